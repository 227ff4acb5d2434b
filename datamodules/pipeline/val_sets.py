"""The sets of held-out prompts of a run, and how their episodes are judged.

Promises: options out of range or without effect are refused by name when the datamodule is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import FINAL_ANSWER
from datamodules.answers import whole_text
from datamodules.groups import Group
from datamodules.prompts.base import PromptSource, prompt_source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValOptions:
    """How the episodes of held-out prompts are judged: the nested `data.val_options` of a config.

    Attributes:
        solved_at: an episode with at least this reward has solved its prompt.
        ks: of pass@k; None for 1, 2, 4, ... and the number of samples.
        answer: text of the last reply -> its final answer, "" for none; episodes with equal answers vote together.
            Import path of a function, or class_path and init_args; None for the whole text. See `datamodules.answers`.
    """

    solved_at: float = 1.0
    ks: Sequence[int] | None = None
    answer: Callable[[str], str] | None = None


@dataclass(frozen=True)
class ValSet:
    """One set of held-out prompts.

    Attributes:
        name: for logs. prefix: of its metrics, "" where it is the only set and has no name.
        source: of its prompts, with an end.
        samples: episodes of each prompt.
        ks: of pass@k; none for the mean reward alone.
        solved_at, answer: see `ValOptions`.
    """

    name: str
    prefix: str
    source: PromptSource
    samples: int
    ks: tuple[int, ...]
    solved_at: float
    answer: Callable[[str], str]

    @property
    def size(self) -> int:
        assert self.source.size is not None
        return self.source.size


def val_sets(
    prompts: PromptSource | Mapping[str, PromptSource] | None,
    samples: int | Mapping[str, int],
    temperature: float,
    options: ValOptions | None,
) -> list[ValSet]:
    """The sets of `RolloutDataModule`'s arguments val_prompts, val_samples, val_temperature and val_options.

    Raises ValueError: an argument out of range or without effect.
    """
    for count in samples.values() if isinstance(samples, Mapping) else [samples]:
        checks.at_least(1, {"val_samples": count})
        if temperature == 0 and count > 1:
            raise ValueError(
                f"val_samples: {count} greedy episodes (val_temperature: 0) of a prompt are all alike;"
                " set val_samples: 1 or val_temperature above 0"
            )
    if prompts is None:
        if options is not None:
            raise ValueError("val_options has no effect without val_prompts; remove it or set val_prompts")
        return []
    named = isinstance(prompts, Mapping)
    sources = dict(prompts) if isinstance(prompts, Mapping) else {"": prompts}
    if not sources:
        raise ValueError("val_prompts: empty; name at least one set, or set it to null")
    if isinstance(samples, Mapping):
        if not named:
            raise ValueError("val_samples: numbers by name need val_prompts by name; give one number")
        if set(samples) != set(sources):
            raise ValueError(f"val_samples: names {sorted(samples)}, val_prompts has {sorted(sources)}; give one each")
    found = []
    for name, source in sources.items():
        key = f"val_prompts.{name}" if named else "val_prompts"
        if named and not name.strip("/ "):
            raise ValueError(f"val_prompts: {name!r} is no name for metrics; call the set something")
        prompt_source(source, key)
        if source.size is None:
            raise ValueError(f"{key}: the source has no end; give it a size")
        count = samples[name] if isinstance(samples, Mapping) else samples
        found.append(_val_set(name if named else source.name, named, source, count, options))
    return found


def _val_set(name: str, named: bool, source: PromptSource, samples: int, options: ValOptions | None) -> ValSet:
    given = options or ValOptions()
    if given.answer is not None and samples == 1:
        raise ValueError(
            f"val_options.answer has no effect on set '{name}' with val_samples: 1, where nobody votes; remove it"
        )
    ks: tuple[int, ...] = ()
    if given.ks is not None:
        ks = tuple(sorted(set(given.ks)))
        if not ks or ks[0] < 1 or ks[-1] > samples:
            raise ValueError(
                f"val_options.ks: {list(given.ks)}, must be from 1 to the {samples} val_samples of '{name}'"
            )
    elif named or samples > 1 or options is not None:
        ks = tuple(sorted({2**k for k in range(samples.bit_length())} | {samples}))
    prefix = f"{name}/" if named else ""
    return ValSet(name, prefix, source, samples, ks, given.solved_at, given.answer or whole_text)


def with_answers(
    groups: list[Group],
    tokenizer: PreTrainedTokenizerBase,
    answer: Callable[[str], str],
    ends: Collection[int] = (),
) -> list[Group]:
    """The groups, the final answer of its last reply, without what of `ends` ended it, in every trajectory's metadata.

    An answer that cannot be had (`answer` raises) is "", with a warning that counts them.
    """
    failures: list[str] = []
    answered = []
    for group in groups:
        last = {one.episode_id: one for one in group.trajectories}  # in order of turns
        answers = {}
        for episode, one in last.items():
            untrained = (~one.loss_mask).nonzero()
            reply = one.tokens[int(untrained[-1]) + 1 if len(untrained) else 0 :]
            if not len(reply):  # the environment had the last word
                reply = one.tokens[one.loss_mask]
            if len(reply) and int(reply[-1]) in ends:
                reply = reply[:-1]
            try:
                answers[episode] = str(answer(tokenizer.decode(reply.tolist(), skip_special_tokens=True)) or "")
            except Exception as error:
                answers[episode] = ""
                failures.append(f"prompt '{group.prompt_id}': {type(error).__name__}: {error}")
        trajectories = [
            replace(one, metadata={**one.metadata, FINAL_ANSWER: answers[one.episode_id]}) for one in group.trajectories
        ]
        answered.append(replace(group, trajectories=trajectories))
    if failures:
        _log.warning(
            "val_options.answer failed on %d episodes, which cast no vote; the first: %s", len(failures), failures[0]
        )
    return answered
