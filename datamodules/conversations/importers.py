"""Makes Arborist's data files from checkouts of the public repositories they come from (nothing is downloaded).

    arborist data import-gsm8k CHECKOUT [--out DIR]                     openai/grade-school-math
    arborist data import-tau CHECKOUT [--tokenizer DIR] [--out DIR]     sierra-research/tau-bench or tau2-bench

Then `export ARBORIST_DATA=DIR`. Promises: a file appears whole or not at all; good conversations are written even
when others are broken; every refused one is reported by file and entry, and the command then exits with status 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from app.text import printable, reason
from datamodules.conversations.chat import ChatEncoder, Transcript, load_chat_tokenizer
from datamodules.conversations.tau import TauImport, read_checkout
from datamodules.conversations.tokens import Conversation, save_npz
from datamodules.files.data_files import RecordedDataError
from datamodules.files.json_lines import parse_json

GSM8K_FILES = ("train.jsonl", "test.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs of `arborist data` to `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    gsm8k = verbs.add_parser("import-gsm8k", help="grade-school problems: gsm8k/train.jsonl, gsm8k/test.jsonl")
    tau = verbs.add_parser(
        "import-tau", help="recorded agent conversations: tau/*.jsonl.gz, *_system.json, *_tokens.npz"
    )
    for verb in (gsm8k, tau):
        verb.add_argument("checkout", metavar="CHECKOUT", help="folder of the cloned repository")
        verb.add_argument("--out", default="data", metavar="DIR", help="data folder to write to (default: data)")
    tau.add_argument("--tokenizer", metavar="DIR", help="tokenizer with a chat template: writes token arrays as well")
    tau.add_argument(
        "--results",
        metavar="GLOB",
        help="names of the result files (default: gpt-4o-airline.json of tau-bench, *.json of tau2-bench)",
    )


def run(args: argparse.Namespace) -> None:
    """Executes one verb. Raises RecordedDataError (nothing usable) or SystemExit (some entries were refused)."""
    checkout, out = Path(args.checkout).expanduser(), Path(args.out).expanduser()
    if not checkout.is_dir():
        raise RecordedDataError(f"CHECKOUT: '{checkout}' is not a folder; clone the repository first")
    refused: list[str] = []
    if args.verb == "import-gsm8k":
        import_gsm8k(checkout, out)
    else:
        refused = import_tau(checkout, out, tokenizer=args.tokenizer, results=args.results)
    for problem in refused:
        print(f"refused: {printable(problem)}", file=sys.stderr)
    print(f"To use it: export ARBORIST_DATA={out.resolve()}")
    if refused:
        raise SystemExit(f"{len(refused)} entries were refused (listed above); everything else was imported")


def import_gsm8k(checkout: Path, out: Path) -> None:
    """Checks and copies the two problem files, byte for byte, with their licence.

    Raises RecordedDataError naming file, line and field; a file with a broken line is not written.
    """
    for name in GSM8K_FILES:
        source = checkout / "grade_school_math" / "data" / name
        if not source.is_file():
            raise RecordedDataError(f"{source}: no such file; CHECKOUT must be a clone of openai/grade-school-math")
        data = source.read_bytes()
        count = 0
        for number, line in enumerate(data.splitlines(), start=1):
            _check_problem(line, f"{source}:{number}")
            count += 1
        if not count:
            raise RecordedDataError(f"{source}: there is no problem in it; check out the file again")
        _write(out / "gsm8k" / name, partial(Path.write_bytes, data=data), f"{count} problems")
    _copy_licence(checkout, out, "grade-school-math")


def import_tau(checkout: Path, out: Path, tokenizer: str | None = None, results: str | None = None) -> list[str]:
    """Writes conversations, system prompts and, with `tokenizer`, token arrays below `out/tau`.

    Returns what was refused, one description each. Raises RecordedDataError when nothing can be imported.
    """
    found = read_checkout(checkout, results)
    if not found.files:
        raise RecordedDataError("; ".join(found.refused) or f"{checkout}: no conversation was found")
    chat_tokenizer = None if tokenizer is None else load_chat_tokenizer(tokenizer, "--tokenizer")
    for note in found.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    for domain, system in found.systems.items():
        text = json.dumps(
            {"policy": system.policy, "system_prompt": system.prompt.text, "tools": system.prompt.tools}, indent=1
        )
        _write(out / "tau" / f"{domain}_system.json", partial(Path.write_text, data=text + "\n"), domain)
    for file in found.files:
        target = out / "tau" / f"{_file_name(file.domain, file.model, file.transcripts)}.jsonl.gz"
        lines = [_line(file.domain, transcript, file.termination[i]) for i, transcript in enumerate(file.transcripts)]
        _write(target, partial(_write_lines, lines=lines), f"{len(lines)} conversations")
    refused = list(found.refused)
    if chat_tokenizer is not None:
        for domain, system in found.systems.items():
            encoder = ChatEncoder(chat_tokenizer, system.prompt)
            conversations = _encode(found, domain, encoder, refused)
            if conversations:
                target = out / "tau" / f"{domain}_tokens.npz"
                _write(target, partial(save_npz, conversations=conversations), f"{len(conversations)} conversations")
    _copy_licence(checkout, out, found.repository)
    return refused


def _encode(found: TauImport, domain: str, encoder: ChatEncoder, refused: list[str]) -> list[Conversation]:
    result = []
    for file in found.files:
        if file.domain != domain:
            continue
        for transcript in file.transcripts:
            try:
                result.append(encoder.encode(transcript))
            except RecordedDataError as error:
                refused.append(f"token arrays: {error}")
    return result


def _check_problem(line: bytes, source: str) -> None:
    try:
        problem = parse_json(line)
    except ValueError as error:
        raise RecordedDataError(f"{source}: not valid JSON ({reason(error)}); check out the file again") from None
    for key in ("question", "answer"):
        if not isinstance(problem, dict) or not isinstance(problem.get(key), str):
            raise RecordedDataError(f"{source}: '{key}' must be a string; check out the file again")
    if "####" not in problem["answer"]:
        raise RecordedDataError(f"{source}: 'answer' has no final answer after '####'; check out the file again")


def _file_name(domain: str, model: str, transcripts: list[Transcript]) -> str:
    """`airline_gpt-4o_50x4` for 50 tasks of 4 trials, `retail_gpt-4.1` where every task was tried once."""
    tasks = len({transcript.task for transcript in transcripts})
    trials = len({transcript.trial for transcript in transcripts})
    name = f"{domain}_{model}".replace("/", "-")
    return name if trials == 1 else f"{name}_{tasks}x{trials}"


def _line(domain: str, transcript: Transcript, termination: str | None) -> str:
    data: dict[str, Any] = {
        "task_id": transcript.task,
        "trial": transcript.trial,
        "domain": domain,
        "model": transcript.model,
        "reward": transcript.reward,
    }
    if termination is not None:
        data["termination"] = termination
    data["messages"] = transcript.messages
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def _write_lines(path: Path, lines: list[str]) -> None:
    """Gzip without name and time in its header: the same conversations give the same bytes."""
    data = "".join(line + "\n" for line in lines).encode()
    with path.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        packed.write(data)


def _write(target: Path, write: Callable[[Path], Any], what: str) -> None:
    """Writes beside the target first, so that an interrupted import leaves no half file under its name."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".part-{target.name}")
        write(part)
        os.replace(part, target)
    except OSError as error:
        raise RecordedDataError(f"--out: cannot write {target} ({error.strerror}); choose another folder") from error
    print(f"wrote {target} ({what})")


def _copy_licence(checkout: Path, out: Path, name: str) -> None:
    """The notice must travel with copies of the data."""
    notices = [path for path in (checkout / "LICENSE", checkout / "LICENSE.md") if path.is_file()]
    if notices:
        _write(out / "LICENSES" / f"{name}.txt", lambda path: shutil.copyfile(notices[0], path), "licence")
