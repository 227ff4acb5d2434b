"""`arborist check WHAT`: whether there is anything to learn, what a step costs, what fits, and what to change first.

    arborist check my_run.yaml --with --model.model.path DIR  rolls out some 256 episodes of that run, without training
    arborist check runs/mine/rollouts                         batches that a run recorded (data.record)
    arborist check airline.npz --model DIR                    recorded conversations with rewards

Says how many groups have different rewards, so that anything can be learned from them, pass@1 beside pass@k, how long
replies are and how many are cut, what the prefix tree saves of a batch, what fits on the device and what a step takes
by the planner's prediction; which tokens end a reply, and whether the chat template drops old thoughts. Then one
verdict (go; go, slowly at first; change something first; no-go) with its reasons. Writes check.json, and
recommended.yaml when there is something to lay over the run.

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
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from app.statistics import share_interval

_EPISODES = 256
_ENOUGH_GROUPS = 12
_VERDICTS = {"no-go": "no-go", "change": "change something first", "slow": "go, slowly at first"}
Level = Literal["no-go", "change", "slow", "note"]


@dataclass(frozen=True)
class Episode:
    """Attributes: reward; tokens, generated; cut: by the limit of tokens, None where the recording does not say."""

    reward: float
    tokens: int
    cut: bool | None = None


@dataclass(frozen=True)
class Rollouts:
    """What was rolled out.

    Attributes:
        groups: episodes of a prompt, a list each. batch: training sequences of one batch (`sequence_files.Sequences`).
        groups_a_batch: groups that `batch` is made of. seconds: of rolling out a batch, where it was measured.
        settings: of the run, as its config.yaml has them; {} where there is none.
    """

    groups: list[list[Episode]]
    batch: Any
    groups_a_batch: int
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reason:
    """A part of the verdict. Attributes: finding, with its number; remedy; overlay, options that carry it out."""

    level: Level
    finding: str
    remedy: str
    overlay: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("what", type=Path, metavar="WHAT", help="a run's YAML, its recorded batches, or an .npz")
    parser.add_argument("--model", type=Path, help="model directory or config.json (default: the run's)")
    parser.add_argument("--tokenizer", help="directory of the tokenizer (default: the run's)")
    parser.add_argument("--episodes", type=int, default=_EPISODES, help="to roll out, at least (default %(default)s)")
    parser.add_argument("--solved-at", type=float, default=1.0, help="least reward of a solved task (default 1)")
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
        ValueError: an option or a field of the data that cannot be used, by name. RuntimeError: rolling out failed.
    """
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
    for part in (_sharing_and_cost(rollouts, arguments), _text(rollouts, arguments)):
        lines += ["", *part[0]]
        figures |= part[1]
        reasons += part[2]
    levels = [reason.level for reason in reasons]
    verdict = next((words for level, words in _VERDICTS.items() if level in levels), "go")
    lines += ["", f"verdict: {verdict}"]
    for reason in sorted(reasons, key=lambda one: get_args(Level).index(one.level)):
        lines.append(f"  {reason.level:<7} {reason.finding}: {reason.remedy}")
    print("\n".join(lines))
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
    print(f"\nwritten: {', '.join(written)}")


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
    episodes = int(data.get("batch_size", 1)) * int(data.get("group_size", 1))
    batches = max(2, math.ceil(arguments.episodes / episodes))
    command += ["--trainer.limit_predict_batches", str(batches), "--data.batches_per_epoch", str(batches)]
    print(f"rolling out {batches} batches of {episodes} episodes", file=sys.stderr)
    done = subprocess.run(command)
    if done.returncode:
        raise RuntimeError(f"WHAT: rolling out {config} failed with exit code {done.returncode}; its error is above")
    return _recorded(run_dir / "rollouts", timed=True)


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
        return Rollouts(groups, sequences, len(usual), seconds, settings)
    if path.suffix != ".npz":
        raise ValueError(f"WHAT: {path} is no YAML, no directory of recorded batches and no .npz: they have rewards")
    from datamodules.conversations.tokens import load_npz

    tasks: dict[tuple[str, str], list[Episode]] = {}
    for one in load_npz(path):
        tasks.setdefault((one.task, one.model), []).append(Episode(one.reward, int((one.ends - one.starts).sum())))
    return Rollouts(list(tasks.values()), load_sequences(path, "turns"), len(tasks))


def _episodes(trajectories: Sequence[Any]) -> list[Episode]:
    by_id: dict[int, list[Any]] = {}
    for one in trajectories:
        by_id.setdefault(one.episode_id, []).append(one)
    return [
        Episode(
            float(turns[0].reward),
            sum(int(turn.loss_mask.sum()) for turn in turns),
            any(turn.finish_reason == "length" for turn in turns),
        )
        for turns in by_id.values()
    ]


# ---- is there anything to learn


Part = tuple[list[str], dict[str, Any], list[Reason]]


def signal(rollouts: Rollouts, solved_at: float) -> Part:
    """Rewards of groups and lengths of replies: text, figures, reasons.

    Raises:
        ValueError: no prompt has two episodes.
    """
    groups = [group for group in rollouts.groups if len(group) > 1]
    if not groups:
        raise ValueError("WHAT: no prompt has two episodes or more, and advantages come from their differences;"
                         " record with data.group_size 2 or more")  # fmt: skip
    n = len(groups)
    rewards = [[one.reward for one in group] for group in groups]
    different = sum(max(each) - min(each) > 1e-6 for each in rewards)
    shares = [sum(r >= solved_at - 1e-6 for r in each) / len(each) for each in rewards]
    first, any_ = statistics.fmean(shares), statistics.fmean(share > 0 for share in shares)
    k = statistics.median_low(len(each) for each in rewards)
    share, (low, high) = different / n, share_interval(different, n)
    every = [reward for each in rewards for reward in each]
    episodes = [one for group in rollouts.groups for one in group]
    tokens = sorted(one.tokens for one in episodes)
    said = [one.cut for one in episodes if one.cut is not None]
    cut = sum(said) / len(said) if said else None
    lines = [
        f"{n:,} groups of {k} episodes, rewards from {min(every):.3g} to {max(every):.3g},"
        f" mean {statistics.fmean(every):.3f}",
        f"groups with different rewards: {different:,} ({share:.0%}; 95% interval {low:.0%} to {high:.0%})",
        f"pass@1 {first:.3f}, pass@{k} {any_:.3f} (a reward of {solved_at:g} or more)",
        f"generated tokens an episode: median {tokens[len(tokens) // 2]:,}, 9 of 10 below"
        f" {tokens[min(len(tokens) - 1, 9 * len(tokens) // 10)]:,}, longest {tokens[-1]:,}"
        + ("" if cut is None else f"; {cut:.0%} cut by the limit"),
    ]
    figures = {"groups": n, "group_size": k, "different": share, "different_interval": [low, high], "pass@1": first,
               f"pass@{k}": any_, "reward": statistics.fmean(every), "tokens_median": tokens[len(tokens) // 2],
               "cut": cut}  # fmt: skip
    reasons = [*_of_signal(n, share, (low, high), first, any_, k, max(every) < solved_at), *_of_length(cut, rollouts)]
    return lines, figures, reasons


def _of_signal(
    n: int, share: float, interval: tuple[float, float], first: float, any_: float, k: int, partial: bool
) -> list[Reason]:
    """`partial`: no episode is solved, so rewards are degrees (or the task is out of reach)."""
    reasons = []
    if n < _ENOUGH_GROUPS:
        reasons.append(Reason("note", f"only {n} groups", "roll out more (--episodes) before trusting this"))
    if interval[1] < 0.1 or share == 0:
        if first > 0.5:
            finding = f"pass@1 is {first:.2f} and {share:.0%} of the groups have different rewards"
            reasons.append(Reason("no-go", finding, "the model can do this already: take harder prompts"))
        else:
            remedy = "no sample shows what is better: warm-start the model on demonstrations, or take easier prompts"
            reasons.append(Reason("no-go", f"{share:.0%} of the groups have different rewards", remedy))
    elif share < 0.5:
        remedy = f"data.filter trains on the others alone, at {1 / share:.1f} rollouts for each that counts"
        if first < 0.1 and not partial:
            remedy += f"; larger groups find more of pass@{k} {any_:.2f}"
        keep = {"class_path": "datamodules.filters.NoSignal"}
        overlay = {"data": {"init_args": {"filter": keep}}}
        finding = f"{1 - share:.0%} of the groups have one reward for all episodes and teach nothing"
        now_and_then = not partial and any_ >= 2 * first
        if now_and_then:
            finding += f", but {any_:.0%} of the prompts are solved in one of {k} tries"
            remedy = (
                f"go all the same: what an answer looks like is often learnt first, and then many more differ; {remedy}"
            )
            remedy += "; if rollouts/flat has not fallen after some twenty steps, take easier prompts"
        reasons.append(Reason("slow" if now_and_then else "change", finding, remedy, overlay))
    if not partial and share >= 0.1 and any_ - first > 0.02:
        finding = f"{any_ - first:.2f} lies between pass@1 and pass@{k}"
        reasons.append(Reason("note", finding, "what the model finds now and then; the first gains come from there"))
    return reasons


def _of_length(cut: float | None, rollouts: Rollouts) -> list[Reason]:
    if cut is None or cut <= 0.1:
        return []
    workflow = rollouts.settings.get("data", {}).get("init_args", {}).get("workflow", {})
    limit = (workflow.get("init_args") or {}).get("max_new_tokens")
    overlay = {}
    if isinstance(limit, int):
        overlay = {"data": {"init_args": {"workflow": {"init_args": {"max_new_tokens": 2 * limit}}}}}
    named = "max_new_tokens of the workflow" if limit is None else f"max_new_tokens, {limit} now"
    return [Reason("change", f"{cut:.0%} of the episodes are cut before their answer", f"raise {named}", overlay)]


# ---- what it costs


def _sharing_and_cost(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    import numpy as np
    import torch

    from app.tree import PrefixTree, device_rates, inspect_model, inspect_tree

    batch = rollouts.batch
    _, keys = np.unique(np.array(batch.temperatures), return_inverse=True)
    tree = PrefixTree.build(batch.tokens, batch.trained, keys=keys, images=batch.images, pictures=batch.pictures)
    report = inspect_tree(tree)
    dense, leaf = report.dense_tokens / report.tree_tokens, report.leaf_tokens / report.tree_tokens
    lines = [
        f"a batch of {rollouts.groups_a_batch:,} groups: {report.sequences:,} sequences, {report.tree_tokens:,} tokens"
        f" as a tree; {dense:.2f} times fewer than one by one, {leaf:.2f} than without prefixes of others"
    ]
    figures: dict[str, Any] = {"tree_tokens": report.tree_tokens, "dense_over_tree": dense, "leaf_over_tree": leaf}
    reasons = []
    if dense < 1.1:
        reasons.append(
            Reason("note", f"sequences share little ({dense:.2f} times)", "the tree neither costs nor helps")
        )
    if rollouts.seconds is not None:
        lines.append(f"rolling a batch out took {rollouts.seconds:.3g} s here")
        figures["rollout_seconds"] = rollouts.seconds
    config = _model_config(rollouts, arguments)
    if config is None:
        return [*lines, "no --model: nothing is said about time and memory"], figures, reasons
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    # Where the run is to train on a device of this kind, what that one can do; else what such a device usually can.
    there = arguments.device == "cpu" or torch.cuda.is_available()
    rates = device_rates(config, arguments.device, dtype) if there else None
    whole = inspect_model(tree, config, arguments.device, dtype, None, None, rates)
    least = inspect_model(tree, config, arguments.device, dtype, None, report.longest, rates)
    steps = arguments.steps or rollouts.settings.get("trainer", {}).get("max_steps") or 0
    each = whole.tree_seconds / arguments.devices
    lines.append(
        f"{whole.name}, {whole.parameters / 1e6:,.3g} M parameters, {dtype} on {arguments.device}: predicted"
        f" {each:.3g} s for forward and backward of the batch ({whole.dense_seconds / whole.tree_seconds:.1f} times"
        f" faster than one by one; {'rates measured here' if there else 'usual rates'})"
        + (f", {_time(each * steps)} for {steps:,} steps" if steps > 0 else "")
    )
    weights, gradients, state = _bytes_a_parameter(dtype)
    fixed = whole.parameters * (weights + gradients + state / arguments.devices) / 2**30
    memory = arguments.gib or _memory(arguments.device) / 2**30
    need, all_ = fixed + least.memory.total / 2**30, fixed + whole.memory.total / 2**30
    lines.append(
        f"memory a device, GiB: {fixed:.3g} for weights, gradients and optimizer, {need:.3g} with the least a pass"
        f" needs, {all_:.3g} with nothing computed twice; there are {memory:.3g}"
    )
    figures |= {"predicted_seconds": each, "rates_measured": there, "parameters": whole.parameters}
    figures |= {"gib_fixed": fixed, "gib_least": need,
                "gib_all": all_, "gib_there": memory}  # fmt: skip
    if need > memory:
        reasons.append(_too_large(whole.parameters, dtype, need - fixed, memory, arguments.devices))
    elif all_ > memory:
        again = least.plan.extra_forward_tokens / max(1, report.tree_tokens)
        finding = f"not all activations fit at once ({all_:.3g} of {memory:.3g} GiB)"
        reasons.append(
            Reason("note", finding, f"up to {again:.0%} of the tokens run forward twice, which costs time only")
        )
    return lines, figures, reasons


def _time(seconds: float) -> str:
    hours, minutes = seconds / 3600, seconds / 60
    return f"{hours:.3g} h" if hours >= 1 else f"{minutes:.3g} min" if minutes >= 1 else f"{seconds:.3g} s"


def _bytes_a_parameter(dtype: str) -> tuple[int, int, int]:
    """Of weights, gradients and Adam's state (docs/scaling.md, "Memory"); the state is shared by the devices."""
    return (2, 4, 12) if dtype == "bfloat16" else (4, 4, 8)


def _too_large(parameters: int, dtype: str, work: float, memory: float, devices: int) -> Reason:
    weights, gradients, state = _bytes_a_parameter(dtype)
    room = (memory - work) * 2**30 / parameters - weights - gradients
    finding = f"the run needs more than the {memory:.3g} GiB of a device"
    if room > 0:
        return Reason(
            "change", finding, f"{max(devices + 1, math.ceil(state / room))} devices share the optimizer's state"
        )
    if parameters * weights / 2**30 + work < memory:
        return Reason(
            "change", finding, "an adapter (model.adapter) trains it: frozen weights need no gradient or state"
        )
    return Reason("no-go", finding, "take a smaller model or larger devices: not even frozen weights fit")


def _memory(device: str) -> int:
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--gib: this machine has no GPU to ask; say how much memory one has")
    return int(torch.cuda.get_device_properties(0).total_memory)


def _model_config(rollouts: Rollouts, arguments: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    from app.tree import read_config

    if arguments.model is not None:
        return read_config(arguments.model)
    source = (rollouts.settings.get("model", {}).get("init_args") or {}).get("model") or {}
    if source.get("path") and Path(source["path"]).exists():
        return read_config(Path(source["path"]))
    fields = source.get("config")
    return AutoConfig.for_model(**fields) if isinstance(fields, dict) and "model_type" in fields else None


# ---- whether model, tokenizer and template agree


def _text(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    from datamodules.prompts.tokenizers import load_tokenizer
    from datamodules.workflows.turn_ends import template_end

    data = rollouts.settings.get("data", {}).get("init_args") or {}
    spec = arguments.tokenizer or data.get("tokenizer")
    if not spec or not Path(spec).is_dir():
        return ["no directory of a tokenizer: nothing is said about the chat template"], {}, []
    tokenizer: Any = load_tokenizer(spec)
    config = _model_config(rollouts, arguments)
    lines, reasons = [], []
    end = template_end(tokenizer)
    named = {"the tokenizer": tokenizer.eos_token_id, "the chat template": end}
    if config is not None:
        named["the model's configuration"] = getattr(config.get_text_config(), "eos_token_id", None)
    ends = {who: what for who, what in named.items() if what is not None}
    lines.append("a reply ends: " + ", ".join(f"{who} {_spelled(tokenizer, what)}" for who, what in ends.items()))
    if config is not None and len(tokenizer) > config.get_text_config().vocab_size:
        finding = f"the tokenizer has {len(tokenizer):,} ids, the model {config.get_text_config().vocab_size:,}"
        reasons.append(Reason("no-go", finding, "take the tokenizer that came with the model"))
    if tokenizer.chat_template:
        drops = _drops_thoughts(tokenizer)
        after = ", so every turn is a branch: the tree shares what comes before it" if drops else ""
        lines.append(f"the chat template {'drops' if drops else 'keeps'} thoughts of earlier turns{after}")
    return lines, {"reply_ends": {who: what for who, what in ends.items()}}, reasons


def _spelled(tokenizer: Any, ids: Any) -> str:
    ids = ids if isinstance(ids, list | tuple) else [ids]
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(int(one))!r} ({one})" for one in ids)


def _drops_thoughts(tokenizer: Any) -> bool:
    """Whether a thought of the turn before is gone from the prompt of the next."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nzebra\n</think>\n\nb"},
                {"role": "user", "content": "c"}]  # fmt: skip
    return "zebra" not in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value
