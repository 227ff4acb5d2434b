"""`arborist compare A B --prompts held_out.jsonl`: is B better than A, by how much, and how sure is that?

    arborist compare runs/sft runs/grpo --prompts held_out.jsonl
    arborist compare models/base runs/grpo --prompts held_out.jsonl --samples 4 --by difficulty
    arborist compare runs/a/checkpoints/last.ckpt models/other --prompts held_out.jsonl --config my_run.yaml

A and B are run directories, model directories, PEFT's directories of an adapter (played on the model it names) or
checkpoints. Both play every prompt with one workflow, reward, template and seed: those of --config, by default of A's
run, or of B's where A's has no workflow; each with its own tokenizer, where that numbers tokens otherwise. Its held-out
prompts, or else its training prompts, say how the file's records are read (fields, template, chat, pictures). Prompts
are compared in pairs, so that hard and easy ones cancel out. Says success, generated tokens and seconds of both, the
difference with its 95% interval and p (McNemar's exact test where rewards are 0 or 1, else prompts drawn again, or
Student's t of seven and fewer, and signs flipped), for each task with --by, and, where the two cannot be told apart,
how many prompts would tell. Writes compare.json.

Promises: nothing is trained; prompts that one side alone answered (the other's engine or reward failed) are left out
and counted, and so are each side's episodes that failed, of prompts with others too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from signal import SIGPIPE
from typing import Any

import yaml

from app.cli.errors import OtherCommandFailed
from app.cli.runs.last_checkpoint import last_checkpoint
from app.cli.runs.run_directory import run_of
from app.statistics import Paired, paired, prompts_to_tell
from app.text import reason

_LEARNT = "train:"
_FORMAT = ("question_field", "answer_field", "template", "answer_pattern", "chat", "system", "image_field")


@dataclass(frozen=True)
class Side:
    """What is compared. Attributes: given, as on the command line; model, as `model.path` names it, with an adapter's
    directory on it, or else checkpoint; config, of the run it is from."""

    given: str
    model: str | None = None
    adapter: Path | None = None
    checkpoint: Path | None = None
    config: Path | None = None


@dataclass(frozen=True)
class Played:
    """What a side did. Attributes: rewards, tokens: means of a prompt's episodes, by prompt; seconds: of all; failed:
    episodes that were asked for and are in none of these, asked: how many were."""

    rewards: dict[str, float]
    tokens: dict[str, float]
    seconds: float
    failed: int = 0
    asked: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("a", metavar="A", type=Path, help="run, model or adapter directory, or checkpoint")
    parser.add_argument("b", metavar="B", type=Path, help="the other")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL that neither was trained on")
    parser.add_argument("--config", type=Path, help="whole configuration to play under (default: A's or B's)")
    parser.add_argument("--samples", type=int, default=1, help="episodes of each prompt; 1 (the default) is greedy")
    parser.add_argument("--temperature", type=float, default=1.0, help="where --samples is above 1 (default 1)")
    parser.add_argument("--by", help="field of the prompts whose values are tasks")
    parser.add_argument("--least", type=float, default=0.05, help="difference worth telling (default 0.05)")
    parser.add_argument("--out", type=Path, help="directory of both sides' files (default runs/compare/TIME)")
    parser.add_argument(
        "--with", dest="more", nargs=argparse.REMAINDER, default=[], help="last: options, as `validate` takes them"
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the comparison and writes compare.json.

    Raises:
        ValueError: an option or a path that cannot be used, by name. OtherCommandFailed: a side could
            not play.
    """
    for name, low in (("samples", 1), ("least", 1e-9), ("temperature", 1e-3)):
        if getattr(arguments, name) < low:
            raise ValueError(f"--{name}: must be above 0, got {getattr(arguments, name)}")
    if not arguments.prompts.is_file():
        raise FileNotFoundError(f"--prompts: there is no file '{arguments.prompts}'; correct the path")
    tasks = _tasks(arguments.prompts, arguments.by)
    sides = [_side(arguments.a, "A"), _side(arguments.b, "B")]
    config = arguments.config or _played_under(sides)
    if _format(_configuration(config)["data"]["init_args"]) is None:
        print(
            f"--prompts: {arguments.prompts} is taken as plain text of the fields 'question' and 'answer', since"
            f" {config} reads no records; options after --with (--data.validation.prompts.init_args.chat true)"
            " say otherwise",
            file=sys.stderr,
        )
    out: Path = arguments.out or Path("runs") / "compare" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    out.mkdir(parents=True, exist_ok=True)
    a, b = (_play(side, name, config, arguments, out) for side, name in zip(sides, "ab", strict=True))
    text, figures = compared(a, b, tasks, arguments.least)
    print(f"A: {arguments.a}\nB: {arguments.b}\n\n{text}")
    figures = {"a": str(arguments.a), "b": str(arguments.b), **figures}
    (out / "compare.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\nwritten: {out / 'compare.json'}")


def compared(a: Played, b: Played, tasks: Mapping[str, str], least: float) -> tuple[str, dict[str, Any]]:
    """Text and figures of a comparison.

    Args:
        tasks: prompt -> its task, {} where there is one. least: difference of rewards that is worth telling.

    Raises:
        ValueError: fewer than two prompts were answered by both.
    """
    both = [prompt for prompt in a.rewards if prompt in b.rewards]
    if len(both) < 2:
        raise ValueError(f"--prompts: both sides answered {len(both)} prompts; two are the least that can be compared")
    lines, figures = [], dict[str, Any]()
    one_sided = len(a.rewards.keys() ^ b.rewards.keys())
    if one_sided:
        lines.append(f"{one_sided} prompts were answered by one side alone and are left out\n")
    for name, side in (("A", a), ("B", b)):
        if side.failed:
            lines.append(
                f"{name}: {side.failed:,} of {side.asked:,} episodes failed and are in none of these numbers, which"
                " flatter it where the hard ones do; the log above names the first error\n"
            )
    rows = [("all", both)]
    names = dict.fromkeys(tasks[prompt] for prompt in both if prompt in tasks)
    rows += [(name, [prompt for prompt in both if tasks.get(prompt) == name]) for name in names]
    lines.append(f"{'task':<20} {'prompts':>7} {'A':>7} {'B':>7} {'B - A':>7}   95% interval")
    for name, prompts in rows:
        if len(prompts) < 2:
            lines.append(f"{name[:20]:<20} {len(prompts):>7}   too few to compare")
            continue
        found = _pairs(a.rewards, b.rewards, prompts)
        first, second = (sum(one.rewards[p] for p in prompts) / len(prompts) for one in (a, b))
        lines.append(
            f"{name[:20]:<20} {len(prompts):>7} {first:>7.3f} {second:>7.3f} {found.difference:>+7.3f}"
            f"   {found.low:+.3f} to {found.high:+.3f}{'' if found.distinguishable else '   not distinguishable'}"
        )
        figures.setdefault("tasks", {})[name] = {"a": first, "b": second, **asdict(found)}
    if len(rows) > 2:
        lines.append("(of many tasks one in twenty seems to differ by chance: intervals are of one task each)")
    whole, tokens = _pairs(a.rewards, b.rewards, both), _pairs(a.tokens, b.tokens, both)
    lines.append(f"\nB against A: {whole.in_words()}")
    if not whole.distinguishable:
        needed = prompts_to_tell(whole, least)
        lines.append(f"a difference of {least:g} would need about {needed:,} prompts like these, played by both")
        figures["prompts_for_least"] = needed
    episodes = [sum(one.tokens[p] for p in both) / len(both) for one in (a, b)]
    differ = "" if tokens.distinguishable else ", not distinguishable"
    lines.append(
        f"generated tokens an episode: {episodes[0]:.1f} and {episodes[1]:.1f}"
        f" ({tokens.difference:+.1f}, 95% interval {tokens.low:+.1f} to {tokens.high:+.1f}{differ})"
    )
    lines.append(f"seconds of all rollouts: {a.seconds:.1f} and {b.seconds:.1f} (one after the other, on this machine)")
    figures |= {"one_sided": one_sided, "failed": [a.failed, b.failed], "tokens": episodes,
                "tokens_paired": asdict(tokens), "seconds": [a.seconds, b.seconds],
                "distinguishable": whole.distinguishable}  # fmt: skip
    return "\n".join(lines), figures


def _pairs(a: Mapping[str, float], b: Mapping[str, float], prompts: list[str]) -> Paired:
    return paired([a[one] for one in prompts], [b[one] for one in prompts])


def _tasks(prompts: Path, by: str | None) -> dict[str, str]:
    """Prompt id -> its task. Ids are the file's stem and the line, as `JsonlPrompts` makes them."""
    from datamodules.files.json_lines import read_json_lines

    if by is None:
        return {}
    found = {}
    for number, record in read_json_lines(prompts):
        if by not in record:
            raise ValueError(f"--by: {prompts}:{number} has no field '{by}'; it has {', '.join(record)}")
        found[str(number)] = str(record[by])
    return found


def _side(path: Path, name: str) -> Side:
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no '{path}'; correct the path")
    config = path / "config.yaml"
    above = path.absolute().parent / "config.yaml"  # `model/` of a run
    for directory, of in ((path, above), (path / "model", config)):
        its = of if of.exists() else None
        if (directory / "config.json").exists():
            return Side(str(path), str(directory), config=its)
        if (directory / "adapter_config.json").exists():
            return Side(str(path), _below(directory, name), directory, config=its)
    if config.exists():
        if (last := last_checkpoint([path / "checkpoints"])) is not None:
            return Side(str(path), checkpoint=last, config=config)
        raise ValueError(f"{name}: {path} has neither model/ nor checkpoints/last.ckpt yet; wait for a checkpoint")
    if path.suffix == ".ckpt":
        own = run_of(path) / "config.yaml"
        if not own.exists():
            raise ValueError(
                f"{name}: {path} lies in no run's checkpoints/, whose config.yaml says what model it is of; give"
                " 'arborist export --ckpt' of it"
            )
        return Side(str(path), checkpoint=path, config=own)
    raise ValueError(f"{name}: {path} is no run directory, no model directory, no adapter and no checkpoint")


def _below(adapter: Path, name: str) -> str:
    """The model that PEFT's directory says it was trained on."""
    try:
        base = json.loads((adapter / "adapter_config.json").read_text("utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{name}: {adapter}/adapter_config.json cannot be read: {reason(error)}") from None
    if not base:
        raise ValueError(
            f"{name}: {adapter} does not say on what model it was trained: name that in base_model_name_or_path of its"
            " adapter_config.json"
        )
    return str(base)


def _played_under(sides: list[Side]) -> Path:
    """The configuration of the first side whose run rolled out. Raises ValueError: there is none."""
    known = [one.config for one in sides if one.config is not None]
    for config in known:
        if _configuration(config)["data"]["init_args"].get("workflow"):
            return config
    why = f"{' and '.join(map(str, known))} name no workflow" if known else "neither A nor B is of a run"
    raise ValueError(f"--config: {why}, so say under which configuration they are to play")


def _play(side: Side, name: str, config: Path, arguments: argparse.Namespace, out: Path) -> Played:
    """Validates one side in a process of its own."""
    settings = _settings(side, config, arguments)
    file, run_dir = out / f"{name}.yaml", out / name
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "app", "validate", "--config", str(file), "--run_dir", str(run_dir)]
    if side.checkpoint is not None:
        command += ["--ckpt_path", str(side.checkpoint)]
    print(f"{name.upper()}: {side.given} plays {arguments.prompts}", file=sys.stderr)
    code = subprocess.run([*command, *arguments.more]).returncode
    if code == 128 + SIGPIPE:  # this command's output is the other's
        raise BrokenPipeError
    if code:
        raise OtherCommandFailed(
            f"{name.upper()}: {side.given} could not play ({file}), exit code {code}; correct what its error above"
            " names"
        )
    (row,) = (json.loads(line) for line in (run_dir / "report.jsonl").read_text("ascii").splitlines())
    (found,) = row["sets"].values()
    # `folder/stem:line` of the file, whose line is what both sides and `_tasks` know it by.
    rewards, tokens = (
        {prompt.rpartition(":")[2]: sum(values) / len(values) for prompt, values in found[key].items()}
        for key in ("rewards", "tokens")
    )
    ended = sum(map(len, found["rewards"].values()))
    return Played(rewards, tokens, row["seconds"], max(0, found["asked"] - ended), found["asked"])


def _settings(side: Side, config: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration `config`, with this side's model and the prompts to compare on."""
    settings = _configuration(config)
    for key in ("run_dir", "ckpt_path", "without_callbacks"):  # the last may name Report, which writes what is compared
        settings.pop(key, None)
    trainer = settings.setdefault("trainer", {})
    trainer |= {"callbacks": [], "logger": None, "limit_val_batches": None}
    model, data = settings["model"]["init_args"], settings["data"]["init_args"]
    own = model.get("model") or {}
    if side.model is not None:
        model["model"] = {key: own[key] for key in ("dtype",) if own.get(key)} | {"path": side.model}
        if side.adapter is not None:
            began = own if side.config is None else _configuration(side.config)["model"]["init_args"].get("model") or {}
            in_bits = {key: began[key] for key in ("quantization",) if began.get(key)}
            model["model"] |= {"adapter": str(side.adapter), **in_bits}
    elif side.config is not None and side.config != config:
        model["model"] = yaml.safe_load(side.config.read_text("utf-8"))["model"]["init_args"]["model"]
    data["tokenizer"] = _tokenizer(side, config, str(data["tokenizer"]))
    if isinstance(data.get("engine"), dict):  # records are for training, and the other side's model may have no experts
        (data["engine"].get("init_args") or {}).pop("record_experts", None)
    validation = data.get("validation") or {}
    prompts = _format(data) or {}
    prompts |= {"path": str(arguments.prompts), "shuffle": False}
    data["validation"] = {
        "prompts": {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": prompts},
        "samples": arguments.samples,
        "temperature": arguments.temperature if arguments.samples > 1 else 0.0,
        "solved_at": validation.get("solved_at", 1.0),
    }
    if not data["tokenizer"].startswith(_LEARNT):  # which learns from the training prompts: else nobody reads them
        data["prompts"] = data["validation"]["prompts"]
    return settings


def _tokenizer(side: Side, config: Path, given: str) -> str:
    """The tokenizer that a side is played with: `given`, that of the configuration, with its chat template, but the
    side's own where that gives tokens other ids, or where `given` is not here."""
    from datamodules.prompts.tokenizers import load_tokenizer

    def ids(spec: str) -> tuple[Any, ...]:
        found = load_tokenizer(spec)
        return found.get_vocab(), found.eos_token_id if side.checkpoint else None  # which a checkpoint is compared by

    given, own = _written(config, given), None
    beside = side.adapter or Path(side.model or "")
    if side.model is not None and (beside / "tokenizer_config.json").is_file():
        own = str(beside)
    elif side.config is not None:
        said = _configuration(side.config)["data"]["init_args"].get("tokenizer")
        own = said and _written(side.config, said)
    if own is None or own == given or own.startswith(_LEARNT):
        return own or given
    try:
        return given if ids(own) == ids(given) else own
    except (ValueError, FileNotFoundError):
        return own


def _written(config: Path, tokenizer: str) -> str:
    """Where a run keeps what it learnt of its prompts, for that; any other tokenizer as it is."""
    kept = config.parent / "tokenizer"
    return str(kept) if tokenizer.startswith(_LEARNT) and kept.is_dir() else tokenizer


def _configuration(config: Path) -> dict[str, Any]:
    """What the file says. Raises ValueError, naming it, for less than a whole run's, and FileNotFoundError."""
    if not config.is_file():
        raise FileNotFoundError(f"--config: there is no file '{config}'; correct the path")
    try:
        settings: dict[str, Any] = yaml.safe_load(config.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {config} is no YAML: {reason(error)}") from None
    for key in ("model", "data"):
        if not isinstance(settings, dict) or not isinstance((settings.get(key) or {}).get("init_args"), dict):
            raise ValueError(f"--config: {config} has no {key}.init_args; name a whole run's configuration")
    return settings


def _format(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the run reads records, held-out ones first: options of `JsonlPrompts`; None where it reads none."""
    configured = (data.get("validation") or {}).get("prompts"), data.get("prompts")
    options = next((one.get("init_args") or {} for one in _sources(configured) if _reads_records(one)), None)
    return None if options is None else {key: options[key] for key in _FORMAT if key in options}


def _sources(configured: Any) -> Iterator[dict[str, Any]]:
    """The sources of prompts in a configuration: one, sets by name, and those that others are made of."""
    if isinstance(configured, dict) and "class_path" in configured:
        yield configured
        configured = configured.get("init_args")
    inner = configured.values() if isinstance(configured, dict) else configured
    for one in inner if isinstance(configured, dict | list | tuple) else ():
        yield from _sources(one)


def _reads_records(source: Mapping[str, Any]) -> bool:
    """Whether a source of this class takes the options of a format, by name or handing them on."""
    from datamodules import prompts
    from datamodules.prompts.records import RecordPrompts

    path = str(source["class_path"])
    try:
        found = pkgutil.resolve_name(path) if "." in path else getattr(prompts, path)
    except Exception:  # a user's module may fail in any way while it is imported
        return False
    if not isinstance(found, type):
        return False
    parameters = inspect.signature(found).parameters
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "template" in parameters or (hands_on and issubclass(found, RecordPrompts))
