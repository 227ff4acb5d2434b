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
from datamodules.pipeline.limits import MOST_EPISODES
from datamodules.prompts.base import PromptSource, prompt_source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValSet:
    """One set of held-out prompts.

    Attributes:
        name: for logs. prefix: of its metrics, "" where it is the only set and has no name.
        source: of its prompts, with an end.
        samples: episodes of each prompt.
        ks: of pass@k; none for the mean reward alone.
        solved_at, answer: see `Validation`.
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


@dataclass(frozen=True)
class Validation:
    """Which held-out prompts are rolled out, and how their episodes are judged: the nested `data.validation` of a
    config.

    Attributes:
        prompts: source of held-out prompts, with an end, or several by name; None for no validation.
        samples: episodes of each prompt, or of each set's by name.
        temperature: of their sampling, 0 is greedy: of every call, whatever temperature the workflow or an agent's own
            request names. What else an agent asks for is treated as in training, temperatures that are refused there
            included.
        batch_size: prompts rolled out at a time.
        solved_at: an episode with at least this reward has solved its prompt (in training's metrics too).
        ks: of pass@k; None for 1, 2, 4, ... and the number of samples.
        answer: text of the last reply -> its final answer, "" for none; episodes with equal answers vote together.
            Import path of a function, or class_path and init_args; None for the whole text. See `datamodules.answers`.

    Raises:
        ValueError: an option out of range or without effect.
    """

    prompts: PromptSource | dict[str, PromptSource] | None = None
    samples: int | dict[str, int] = 1
    temperature: float = 0.0
    batch_size: int = 256
    solved_at: float = 1.0
    ks: Sequence[int] | None = None
    answer: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        checks.temperature("validation.temperature", self.temperature)
        checks.at_least(1, {"validation.batch_size": self.batch_size})
        checks.at_most(MOST_EPISODES, {"validation.batch_size": self.batch_size})
        for count in self.samples.values() if isinstance(self.samples, Mapping) else [self.samples]:
            checks.at_least(1, {"validation.samples": count})
            if self.temperature == 0 and count > 1:
                raise ValueError(
                    f"validation.samples: {count} greedy episodes (validation.temperature: 0) of a prompt are all"
                    " alike; set validation.samples: 1 or validation.temperature above 0"
                )
        if self.prompts is None:
            for name in ("samples", "temperature", "batch_size", "ks", "answer"):  # `solved_at` is training's too
                if getattr(self, name) != getattr(Validation, name):
                    raise ValueError(
                        f"validation.{name} has no effect without validation.prompts; remove it or set"
                        " validation.prompts (trainer.limit_val_batches: 0 leaves validation out)"
                    )
        self.sets()

    def sets(self) -> list[ValSet]:
        """The sets of prompts, none without `prompts`. Raises ValueError as the class."""
        if self.prompts is None:
            return []
        if not isinstance(self.prompts, Mapping):
            if isinstance(self.samples, Mapping):
                raise ValueError("validation.samples: numbers by name need validation.prompts by name; give one number")
            source = _finite(self.prompts, "validation.prompts")
            return [self._set(source.name, "", source, self.samples)]
        if not self.prompts:
            raise ValueError("validation.prompts: empty; name at least one set, or set it to null")
        if isinstance(self.samples, Mapping) and set(self.samples) != set(self.prompts):
            raise ValueError(
                f"validation.samples: names {sorted(self.samples)}, validation.prompts has {sorted(self.prompts)};"
                " give one each"
            )
        found = []
        for name, source in self.prompts.items():
            if not name.strip("/ "):
                raise ValueError(f"validation.prompts: {name!r} is no name for metrics; call the set something")
            samples = self.samples[name] if isinstance(self.samples, Mapping) else self.samples
            found.append(self._set(name, f"{name}/", _finite(source, f"validation.prompts.{name}"), samples))
        return found

    def _set(self, name: str, prefix: str, source: PromptSource, samples: int) -> ValSet:
        if self.answer is not None and samples == 1:
            raise ValueError(
                f"validation.answer has no effect on set '{name}' with validation.samples: 1, where nobody votes;"
                " remove it"
            )
        ks: tuple[int, ...] = ()
        if self.ks is not None:
            ks = tuple(sorted(set(self.ks)))
            if not ks or ks[0] < 1 or ks[-1] > samples:
                raise ValueError(
                    f"validation.ks: {list(self.ks)}, must be from 1 to the {samples} validation.samples of '{name}'"
                )
        elif prefix or samples > 1 or self.solved_at != 1.0:
            ks = tuple(sorted({2**k for k in range(samples.bit_length())} | {samples}))
        return ValSet(name, prefix, source, samples, ks, self.solved_at, self.answer or whole_text)


def _finite(source: object, key: str) -> PromptSource:
    source = prompt_source(source, key)
    if source.size is None:
        raise ValueError(f"{key}: the source has no end; give it a size")
    return source


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
            "validation.answer failed on %d episodes, which cast no vote; the first: %s", len(failures), failures[0]
        )
    return answered
