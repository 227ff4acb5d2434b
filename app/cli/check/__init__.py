"""`arborist check WHAT`: whether there is anything to learn, what a step costs, what fits, and what to change first.

    arborist check configs/quickstart.yaml --with --config my_run.yaml --model.model.path DIR
                                                              rolls out some 256 episodes of that run, without training
    arborist check runs/mine/rollouts                         batches that a run recorded (data.record)
    arborist check airline.npz --model DIR                    recorded conversations with rewards

Says how many groups have different rewards, so that anything can be learned from them, pass@1 beside pass@k, how long
replies are and how many are cut, how much of the rewards is noise of the judge that gave them (asked again for some),
what the prefix tree saves of a batch, what fits on the device and what a step takes by the planner's prediction; which
tokens end a reply, and whether the chat template drops old thoughts. Then one verdict (go; go, slowly at first; change
something first; no-go) with its reasons. Writes check.json, and recommended.yaml when there is something to lay over
the run.

Promises: nothing is trained; every reason comes with its number and a remedy; what cannot be told is left out, never
guessed. Times and memory are the planner's predictions (benchmarks/results/tree has how far off these are).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from signal import SIGPIPE
from typing import Any, get_args

import yaml

from app.cli.check.agreement import of_text
from app.cli.check.cost import sharing_and_cost
from app.cli.check.findings import Episode, Level, Rollouts
from app.cli.check.judging import judged_again
from app.cli.check.learning import signal
from app.cli.errors import OtherCommandFailed

_EPISODES = 256
_VERDICTS = {"no-go": "no-go", "change": "change something first", "slow": "go, slowly at first"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("what", type=Path, metavar="WHAT", help="a run's YAML, its recorded batches, or an .npz")
    parser.add_argument("--model", type=Path, help="model directory or config.json (default: the run's)")
    parser.add_argument("--tokenizer", help="directory of the tokenizer (default: the run's)")
    parser.add_argument("--episodes", type=int, default=_EPISODES, help="to roll out, at least (default %(default)s)")
    parser.add_argument("--solved-at", type=float, default=1.0, help="least reward of a solved task (default 1)")
    parser.add_argument("--judge-again", type=int, default=64, metavar="N", help="where a judge gives rewards, of how"
                        " many replies it is asked a second time (default %(default)s; 0: none)")  # fmt: skip
    parser.add_argument("--steps", type=int, help="optimizer steps of the run (default: the run's trainer.max_steps)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what is trained on")
    parser.add_argument("--gib", type=float, help="memory of one device (default: this machine's)")
    parser.add_argument("--devices", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--out", type=Path, help="directory for check.json (default runs/check/NAME)")
    parser.add_argument(
        "--with",
        dest="more",
        nargs=argparse.REMAINDER,
        default=[],
        help="last: options of the run, as `fit` takes them",
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the report and writes the files.

    Raises:
        ValueError: an option or a field of the data that cannot be used, by name. OtherCommandFailed: rolling out
            failed.
    """
    if arguments.judge_again < 0:
        raise ValueError(f"--judge-again: must be 0 or more, got {arguments.judge_again}")
    for name in ("episodes", "steps", "gib", "devices"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name}: must be above 0, got {value}")
    what: Path = arguments.what
    if not what.exists():
        raise FileNotFoundError(f"WHAT: there is no '{what}'; correct the path")
    rolls_out = what.suffix in (".yaml", ".yml")
    if arguments.more and not rolls_out:
        raise ValueError(f"WHAT: {what} is recorded, --with has no effect on it: leave them out")
    out: Path = arguments.out or Path("runs") / "check" / what.name.split(".")[0]
    out.mkdir(parents=True, exist_ok=True)
    rollouts = _rolled_out(what, arguments, out) if rolls_out else _recorded(what)
    lines, figures, reasons = signal(rollouts, arguments.solved_at)
    for look in (judged_again, sharing_and_cost, of_text):
        part = look(rollouts, arguments)
        lines += ["", *part[0]] if part[0] else []
        figures |= part[1]
        reasons += part[2]
    levels = [reason.level for reason in reasons]
    verdict = next((words for level, words in _VERDICTS.items() if level in levels), "go")
    lines += ["", f"verdict: {verdict}"]
    for reason in sorted(reasons, key=lambda one: get_args(Level).index(one.level)):
        lines.append(f"  {reason.level:<7} {reason.finding}: {reason.remedy}")
    found = {"verdict": verdict, "reasons": [asdict(one) for one in reasons], **figures}
    (out / "check.json").write_text(json.dumps(found, indent=1) + "\n")
    written = [str(out / "check.json")]
    overlay: dict[str, Any] = {}
    for reason in reasons:
        _merge(overlay, reason.overlay)
    if overlay:
        (out / "recommended.yaml").write_text(
            "# Laid over the run that was checked: --config\n" + yaml.safe_dump(overlay)
        )
        written.append(str(out / "recommended.yaml"))
    lines += ["", f"written: {', '.join(written)}"]
    print("\n".join(lines))  # last: nobody may read to the end


# ---- what was rolled out


def _rolled_out(config: Path, arguments: argparse.Namespace, out: Path) -> Rollouts:
    """Plays the run's prompts with `predict`, in a process of its own."""
    run_dir = out / f"rolled_out_{datetime.now():%Y-%m-%d_%H-%M-%S}"
    command = [sys.executable, "-m", "app", "predict", "--config", str(config), *arguments.more]
    command += ["--data.record", "rollouts", "--run_dir", str(run_dir)]
    shown = subprocess.run([*command, "--print_config"], capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(f"WHAT: {config}: {shown.stderr.strip()}")
    data = yaml.safe_load(shown.stdout)["data"]["init_args"]
    unfiltered = "" if data.get("filter") is None else ", without data.filter"
    if unfiltered:  # it would leave out the groups that are to be counted; its limits have no effect without it
        command += ["--data.filter", "null", "--data.limits.max_filtered", "null", "--data.limits.rest", "null"]
    episodes = int(data.get("batch_size", 1)) * int(data.get("group_size", 1))
    batches = max(2, math.ceil(arguments.episodes / episodes))
    command += ["--trainer.limit_predict_batches", str(batches), "--data.batches_per_epoch", str(batches)]
    print(f"rolling out {batches} batches of {episodes} episodes{unfiltered}", file=sys.stderr)
    try:
        done = subprocess.run(command)
    except KeyboardInterrupt:
        whole = len(list((run_dir / "rollouts").glob("batch_*.safetensors")))
        left = f"arborist check {run_dir / 'rollouts'} judges the {whole} that are there" if whole else "none is there"
        print(f"\ninterrupted: no verdict of {batches} batches; {left}", file=sys.stderr)
        raise
    if done.returncode == 128 + SIGPIPE:  # this command's output is the other's
        raise BrokenPipeError
    if done.returncode:
        raise OtherCommandFailed(
            f"WHAT: rolling out {config} failed with exit code {done.returncode}; correct what its error above names"
        )
    found = _recorded(run_dir / "rollouts", timed=True)
    if unfiltered:
        found.settings["data"]["init_args"]["filter"] = data["filter"]  # which the run trains with
    return found


def _recorded(path: Path, timed: bool = False) -> Rollouts:
    """Recorded batches with the configuration beside them, or an .npz of conversations."""
    from datamodules.conversations.sequence_files import load_sequences, of_batch

    if path.is_dir():
        from datamodules.files.recording import read_batch, versions
        from datamodules.groups import to_batch

        known = versions(path)
        if not known:
            raise ValueError(f"WHAT: {path} holds no batch_*.safetensors; name a directory that a run recorded to")
        batches = [read_batch(path, version) for version in known]
        groups = [_episodes(group.trajectories) for batch in batches for group in batch]
        sizes = [sum(len(one.tokens) for group in batch for one in group.trajectories) for batch in batches]
        usual = batches[sizes.index(statistics.median_high(sizes))]
        sequences = of_batch(to_batch(usual))
        seconds = None
        if timed and len(known) > 1:  # this process's own recording: a file is written when its batch is whole
            ends = sorted(file.stat().st_mtime for file in path.glob("batch_*.safetensors"))
            seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
        config = path.parent / "config.yaml"
        settings = yaml.safe_load(config.read_text("utf-8")) if config.exists() else {}
        filtered = ((settings.get("data") or {}).get("init_args") or {}).get("filter") is not None
        return Rollouts(groups, sequences, len(usual), seconds, settings, path, filtered)
    if path.suffix != ".npz":
        raise ValueError(
            f"WHAT: {path} is no YAML, no directory of recorded batches and no .npz: these have what is checked;"
            " `arborist data import-tau --tokenizer DIR` writes a *_tokens.npz beside its .jsonl.gz"
        )
    from datamodules.conversations.tokens import load_npz

    tasks: dict[tuple[str, str], list[Episode]] = {}
    for one in load_npz(path):
        tasks.setdefault((one.task, one.model), []).append(Episode(one.reward, int((one.ends - one.starts).sum())))
    return Rollouts(list(tasks.values()), load_sequences(path, "turns"), len(tasks))


def _episodes(trajectories: Sequence[Any]) -> list[Episode]:
    from datamodules.groups import earned

    by_id: dict[int, list[Any]] = {}
    for one in trajectories:
        by_id.setdefault(one.episode_id, []).append(one)
    return [
        Episode(
            float(earned(turns)),
            sum(int(turn.loss_mask.sum()) for turn in turns),
            any(turn.finish_reason == "length" for turn in turns),
        )
        for turns in by_id.values()
    ]


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
