"""`arborist reward try CONFIG LABELLED`: how far a reward can be trusted, on replies whose worth is known.

    arborist reward try my_reward.yaml labelled.jsonl
    arborist reward try my_reward.yaml runs/mine/recorded --tokenizer my_model

Asks the reward that CONFIG names (`reward` and `reward_options`, at the top or where a run has them, in
`data.init_args`) about every reply, as a run would, and compares its numbers with the labels: their order, over all and
within the replies to one task; for labels of 0 and 1 how well a threshold could tell them apart and how far the number
is a probability; each part of the reward alone. And what that used.

LABELLED: a .jsonl file, a reply a line: `label` (a number), `completion` (a text) or `transcript` (a list of messages),
`prompt` (a text) or `messages`, and where wanted `answer`, `id` of the task (replies with the same one are a group) and
`metadata`; or a directory of batches that a run recorded (batch_*.safetensors; needs --tokenizer), whose rewards are
the labels, but for those that stand for a verdict that failed (`reward_options.on_failure`).

Promises: nothing is trained; a reply that the reward refuses, or that has no label, is counted and the reason shown,
never taken for a 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from app.cli.errors import explain
from app.clients import no_keys_needed

if TYPE_CHECKING:  # torch takes seconds, and `--help` none
    from app.batch import Trajectory
    from datamodules.groups import Group

_BINS = 5


@dataclass(frozen=True)
class Labelled:
    """A reply whose worth is known. Attributes: prompt; reply, a text or messages; label; is_verdict: of a reward that
    read the reply, False for a score in its place (`reward_options.on_failure`)."""

    prompt: Any
    reply: Any
    label: float
    is_verdict: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("action", choices=("try",), help="compare a reward with labels")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML with the reward")
    parser.add_argument("labelled", type=Path, metavar="LABELLED", help="replies with labels")
    parser.add_argument("--tokenizer", metavar="DIR", help="that of recorded batches")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N replies")
    parser.add_argument("--out", type=Path, metavar="FILE", help="every reply's number, label and parts, as JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Prints the comparison.

    Raises:
        ValueError: a file, a field or an option that cannot be used, by name; or no reply was judged at all.
        FileNotFoundError: no such file.
    """
    from datamodules.rewards.judges.pool import reward_pool

    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit: must be at least 1, got {arguments.limit}")
    for name in ("config", "labelled"):
        if not getattr(arguments, name).exists():
            raise FileNotFoundError(f"{name.upper()}: there is no '{getattr(arguments, name)}'; correct the path")
    reward, options = configured(arguments.config)
    rows = labelled(arguments.labelled, arguments.tokenizer)[: arguments.limit]
    if unlabelled := sum(not row.is_verdict for row in rows):
        print(f"{unlabelled} of {len(rows)} replies left out: their reward stands for a verdict that failed, no label")
        rows = [row for row in rows if row.is_verdict]
    if not rows:
        raise ValueError("LABELLED: no reply has a label: every recorded reward stands for a verdict that failed")
    if arguments.out is not None:  # before anything is paid for
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.touch()
    pool = reward_pool(reward, options)
    try:
        found = asyncio.run(judged(pool, rows))
    finally:
        pool.close()
    if arguments.out is not None:
        arguments.out.write_text("".join(json.dumps(_line(row, one)) + "\n" for row, one in zip(rows, found)))
    print(report(rows, found, pool.spent()))


def configured(path: Path) -> tuple[Any, Any]:
    """The reward and its options that a YAML file names. Raises ValueError: it names none, or one that is refused."""
    from collections.abc import Callable

    from jsonargparse import ArgumentError, ArgumentParser

    from datamodules.prompts.base import Prompt
    from datamodules.rewards.judges.base import Judge
    from datamodules.rewards.options import RewardOptions

    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"CONFIG: {path} is no YAML: {error}") from None
    with suppress(AttributeError, TypeError, KeyError):
        if "reward" not in config:
            config = config["data"].get("init_args", config["data"])
    if not isinstance(config, dict) or not config.get("reward"):
        raise ValueError(f"CONFIG: {path} names no reward, neither at the top nor in data.init_args; add one")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Judge | Callable[[Prompt, str], float])
    parser.add_argument("--reward_options", type=RewardOptions, default=RewardOptions())
    try:
        with no_keys_needed():  # by what its module makes as it is imported
            parsed = parser.parse_object(
                {name: config[name] for name in ("reward", "reward_options") if name in config}
            )
        made = parser.instantiate(parsed)
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"CONFIG: {path}: {explain(str(error), config)}") from error
    return made.reward, made.reward_options


def labelled(path: Path, tokenizer: str | None) -> list[Labelled]:
    """The replies of a file or a directory, in order. Raises ValueError, naming the line and the field."""
    if path.is_dir():
        if tokenizer is None:
            raise ValueError("--tokenizer: recorded batches hold token ids; name the directory of their tokenizer")
        return recorded(path, tokenizer)
    if tokenizer is not None:
        raise ValueError("--tokenizer has no effect on lines of text; leave it out")
    from datamodules.files.json_lines import read_json_lines

    rows = []
    for number, fields in read_json_lines(path):
        try:
            rows.append(_row(fields, number))
        except (ValueError, TypeError) as error:
            raise ValueError(f"LABELLED: {path}, line {number}: {error}") from error
    if not rows:
        raise ValueError(f"LABELLED: {path} holds no reply")
    return rows


def _row(fields: dict[str, Any], number: int) -> Labelled:
    from datamodules.prompts.base import Prompt

    known = {"label", "completion", "transcript", "prompt", "messages", "answer", "id", "metadata"}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"'{unknown[0]}' is not known; put it into metadata (known: {', '.join(sorted(known))})")
    label = fields.get("label")
    if isinstance(label, bool) or not isinstance(label, int | float) or label != label:
        raise ValueError("label: must be a number")
    if ("completion" in fields) == ("transcript" in fields) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError("needs one of completion and transcript, and one of prompt and messages")
    task = fields.get("prompt", ""), tuple(fields.get("messages", ()))
    prompt = Prompt(
        id=f"line {number}" if fields.get("id") in (None, "") else str(fields["id"]),  # 0 is one
        text=task[0],
        messages=task[1],
        answer=str(fields.get("answer", "")),
        metadata=fields.get("metadata", {}),
    )
    return Labelled(prompt, fields.get("completion", fields.get("transcript")), float(label))


def recorded(path: Path, tokenizer: str) -> list[Labelled]:
    """The replies of recorded batches, with their rewards as labels. Raises ValueError: there is none."""
    return [row for _, rows in recorded_groups(path, tokenizer) for row in rows]


def recorded_groups(path: Path, tokenizer: str) -> Iterator[tuple[Group, list[Labelled]]]:
    """Each recorded group, and its replies as `recorded` has them. Raises ValueError: there is none."""
    from datamodules.files.recording import read_batch, versions
    from datamodules.prompts.tokenizers import load_tokenizer

    known = versions(path)
    if not known:
        raise ValueError(f"LABELLED: {path} holds no batch_*.safetensors; name a directory that a run recorded to")
    reads = load_tokenizer(tokenizer)
    for version in known:
        for group in read_batch(path, version):
            last = {each.episode_id: each for each in group.trajectories}  # an episode's last sequence
            yield group, [_recorded(one, group, reads) for one in last.values()]


def _recorded(one: Trajectory, group: Group, reads: Any) -> Labelled:
    from datamodules.prompts.base import Prompt

    first = int(one.loss_mask.nonzero()[0]) if one.loss_mask.any() else len(one.tokens)
    text = reads.decode(one.tokens[:first].tolist(), skip_special_tokens=True)
    said = one.metadata.get("completion")
    if not isinstance(said, str):
        said = reads.decode(one.tokens[first:].tolist(), skip_special_tokens=True)
    # Two groups of one prompt are two groups.
    prompt = Prompt(f"{group.prompt_id} ({group.index})", text, answer=str(one.metadata.get("answer", "")))
    failed = one.metadata.get("reward_failed") or one.metadata.get("reward_unreadable")
    return Labelled(prompt, said, one.reward, is_verdict=not failed)


async def judged(pool: Any, rows: Sequence[Labelled]) -> list[Any]:
    """A judgement, or the error, of each."""
    await pool.open()
    groups: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row.prompt.id, []).append(at)
    found: list[Any] = [None] * len(rows)

    async def one(at: int, score: Any) -> None:
        try:
            found[at] = await score(rows[at].prompt, rows[at].reply)
        except Exception as error:
            found[at] = error

    await asyncio.gather(
        *(one(at, score) for group in groups.values() for at, score in zip(group, pool.of_group(len(group))))
    )
    return found


def report(rows: Sequence[Labelled], found: Sequence[Any], spent: dict[str, float]) -> str:
    """The comparison as text. Raises ValueError: nothing was judged."""
    from datamodules.rewards.options import Judgement

    judged = [(row, one) for row, one in zip(rows, found) if isinstance(one, Judgement) and not one.failed]
    failed = [str(getattr(one, "failed", one)) for one in found if not isinstance(one, Judgement) or one.failed]
    if not judged:
        raise ValueError(f"none of {len(rows)} replies was judged; the first: {failed[0]}")
    labels = [row.label for row, _ in judged]
    values = [one.value for _, one in judged]
    lines = [
        f"{len(judged)} of {len(rows)} replies judged"
        + (f"; {len(failed)} refused, the first: {failed[0]}" if failed else "")
    ]
    lines.append(f"{'':<22}{'mean':>8}{'lowest':>8}{'highest':>8}{'order':>8}{'pairs':>8}")
    lines.append(f"{'label':<22}{statistics.fmean(labels):>8.3f}{min(labels):>8.3f}{max(labels):>8.3f}")
    tasks = [row.prompt.id for row, _ in judged]
    columns: dict[str, list[float | None]] = {"reward": list(values)}
    for name in dict.fromkeys(name for _, one in judged for name in one.parts):
        columns[name] = [one.parts.get(name) for _, one in judged]
    for name, numbers in columns.items():
        here = [(task, number, label) for task, number, label in zip(tasks, numbers, labels) if number is not None]
        told = [number for _, number, _ in here]
        lines.append(
            f"{name:<22}{statistics.fmean(told):>8.3f}{min(told):>8.3f}{max(told):>8.3f}"
            f"{_figure(_spearman(told, [label for *_, label in here])):>8}{_figure(_pairs(here)):>8}"
        )
    lines.append(
        "order: Spearman's correlation with the label; pairs: of two replies to one task with different labels,"
    )
    lines.append("the share in the label's order (a tie is half): 0.5 is chance")
    if set(labels) == {0.0, 1.0} and min(values) >= 0 and max(values) <= 1:
        lines += ["", *_binary(values, labels)]
    if spent:
        lines += [
            "",
            "used: "
            + ", ".join(f"{name.removeprefix('judge_')} {value:,.6g}" for name, value in spent.items() if value),
        ]
    return "\n".join(lines)


def _spearman(values: Sequence[float], labels: Sequence[float]) -> float | None:
    import torch
    from torchmetrics.functional import spearman_corrcoef

    if len(set(values)) < 2 or len(set(labels)) < 2:
        return None
    return float(
        spearman_corrcoef(torch.tensor(values, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64))
    )


def _pairs(rows: Sequence[tuple[str, float, float]]) -> float | None:
    by_task: dict[str, list[tuple[float, float]]] = {}
    for task, value, label in rows:
        by_task.setdefault(task, []).append((value, label))
    right = [
        0.5 if better[0] == worse[0] else float(better[0] > worse[0])
        for group in by_task.values()
        for better in group
        for worse in group
        if better[1] > worse[1]
    ]
    return statistics.fmean(right) if right else None


def _binary(values: Sequence[float], labels: Sequence[float]) -> list[str]:
    import torch
    from torchmetrics.functional.classification import binary_auroc, binary_calibration_error

    numbers, truth = torch.tensor(values), torch.tensor(labels).long()
    area, off = float(binary_auroc(numbers, truth)), float(binary_calibration_error(numbers, truth, n_bins=_BINS))
    lines = [f"area under the ROC curve {area:.3f} (0.5 is chance); calibration error {off:.3f}; of rewards"]
    for bin_ in range(_BINS):
        low, high = bin_ / _BINS, (bin_ + 1) / _BINS
        here = [one for number, one in zip(values, labels) if low <= number < high or (number == high == 1.0)]
        if here:
            lines.append(
                f"  {low:.1f} to {high:.1f}: {len(here):>6} replies, {statistics.fmean(here):.3f} of them right"
            )
    return lines


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _line(row: Labelled, one: Any) -> dict[str, Any]:
    about = {"id": row.prompt.id, "label": row.label}
    if isinstance(one, Exception):
        return {**about, "refused": str(one)}
    return {**about, "reward": one.value, **({"refused": one.failed} if one.failed else {}), "parts": one.parts}
