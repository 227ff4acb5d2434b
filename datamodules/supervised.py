"""`SupervisedDataModule`: prompts with their solutions as training sequences, for a supervised (warm) start; and
`PairsDataModule`: prompts with a chosen and a rejected answer, for preference optimisation (objective `dpo`).

Promises: batch k holds prompts `k * batch_size` to `(k + 1) * batch_size - 1` of the source, whatever the ranks; the
solution and the token that ends it are trained, the prompt is not; the stream goes on over epochs and resumes. A pair
is a group of two episodes, first the chosen one with reward 1.0, then the rejected one with 0.0; batches hold whole
pairs, and the tree computes the prompt of a pair, and whatever its answers have in common at their beginning, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import RolloutBatch, Trajectory
from datamodules.answers import whole_text
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.groups import Group
from datamodules.pipeline import fingerprint
from datamodules.pipeline.loaders import EvalLoader, Position, StepLoader
from datamodules.pipeline.validation import ValSet
from datamodules.prompts.base import Prompt, PromptSource, prompt_source
from datamodules.prompts.dealer import encoded
from datamodules.prompts.records import reply_text
from datamodules.prompts.tokenizers import encode_prompt, encode_reply, load_tokenizer, texts_of
from datamodules.workflows.turn_ends import template_end


class SupervisedDataModule(L.LightningDataModule):
    """Imitation of the solutions of a prompt source.

    Args:
        prompts: source of prompts with solutions or answers (a `PromptSource`); its seed decides the order.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.prompts.tokenizers`).
        batch_size: sequences a batch, over all ranks.
        batches_per_epoch: batches an epoch.
        max_tokens: sequences longer than this are refused, by name; None for no limit of our own.

    Raises:
        ValueError: an argument out of range; (when dealt) a prompt without solution, too long, or that the tokenizer
            has no tokens for.
    """

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: str,
        batch_size: int = 64,
        batches_per_epoch: int = 100,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        counts = {"batch_size": batch_size, "batches_per_epoch": batches_per_epoch, "max_tokens": max_tokens}
        checks.at_least(1, counts)
        self.prompts = prompt_source(prompts, "prompts")
        self.tokenizer_spec = tokenizer
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.image_processor: ImageProcessor | None = None
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self.max_tokens = max_tokens
        self._position = Position()
        self._made_with = {"batch_size": str(batch_size)}

    def setup(self, stage: str) -> None:
        if self.tokenizer is not None:
            return
        self.tokenizer = load_tokenizer(self.tokenizer_spec, texts_of(self.prompts))
        self.image_processor = ImageProcessor.beside(self.tokenizer_spec, self.tokenizer)
        trainer = self.trainer
        directory = trainer.log_dir if trainer else None  # asked on every rank: Lightning broadcasts it
        if self.tokenizer_spec.startswith("train:") and trainer and trainer.is_global_zero and directory:
            self.tokenizer.save_pretrained(Path(directory) / "tokenizer")
        self._made_with |= fingerprint.of_tokenizer(self.tokenizer)
        self._made_with["prompts"] = fingerprint.of_prompts(self.prompts)

    def batch(self, position: int) -> RolloutBatch:
        """Batch number `position`, from 0, of the endless stream."""
        first = position * self.batch_size
        positions = range(first, first + self.batch_size)
        return RolloutBatch.from_trajectories(chain.from_iterable(map(self.trajectories, positions)))

    @cached_property
    def _chat_end(self) -> int | None:
        assert self.tokenizer is not None
        return template_end(self.tokenizer)

    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @property
    def groups_per_batch(self) -> tuple[str, int]:
        """The option that says how many groups a batch holds, and its value."""
        return "batch_size", self.batch_size

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return self._position.is_under_way(version)

    def hand_out(self, version: int) -> RolloutBatch | None:
        """See `BatchStream`."""
        number = self._position.hand_out(version)
        assert self.trainer is not None
        return self.batch(number) if self.trainer.is_global_zero else None

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        position = self._position.state_dict(self.trainer.lightning_module.policy_version)
        return {**position, fingerprint.KEY: dict(self._made_with)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warns of another stream's settings. Raises ValueError where it was made with another tokenizer."""
        fingerprint.compare(state_dict, self._made_with)
        self._position.load_state_dict(state_dict)

    def trajectories(self, index: int) -> list[Trajectory]:
        """The training sequences of the prompt at stream position `index`."""
        prompt = self.prompts.deal(index)
        return [self.imitation(prompt, prompt.solution or prompt.answer, group=index, episode=index)]

    def imitation(self, prompt: Prompt, solution: str, group: int, episode: int, reward: float = 0.0) -> Trajectory:
        """The prompt, then `solution` and what ends it, which are trained. Raises ValueError as the class.

        A chat's end is that of the chat template, where it has one; a text's is the tokenizer's end of sequence.
        """
        assert self.tokenizer is not None, "batches come after setup"
        if not solution:
            raise ValueError(f"prompt '{prompt.id}' has neither solution nor answer to imitate; set answer_field")
        told = encoded(prompt, partial(encode_prompt, self.tokenizer), self.image_processor)
        given, made = told.tokens, encode_reply(self.tokenizer, prompt, solution, self._chat_end)
        length = len(given) + len(made)
        if self.max_tokens is not None and length > self.max_tokens:
            raise ValueError(
                f"prompt '{prompt.id}' and its solution have {length} tokens, more than max_tokens {self.max_tokens};"
                " raise max_tokens or remove it from the data"
            )
        return Trajectory(
            tokens=torch.tensor([*given, *made]),
            loss_mask=torch.arange(length) >= len(given),
            behavior_logprobs=torch.zeros(length, dtype=torch.float32),
            versions=torch.full((length,), -1),
            reward=reward,
            group_id=group,
            episode_id=episode,
            prompt_id=prompt.id,
            images=torch.tensor([*told.images, *[-1] * len(made)]) if told.pictures else None,
            pictures=told.pictures,
        )


class PairsDataModule(SupervisedDataModule):
    """Pairs of answers. The chosen one is the prompt's solution: `answer_field: chosen` of any prompt source.

    Args:
        prompts: source of prompts with both answers (a `PromptSource`); its seed decides the order.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.prompts.tokenizers`).
        rejected_field: key of the prompt's metadata with the other answer, as text or as chat messages whose last is
            the answer.
        batch_size: pairs a batch, over all ranks.
        batches_per_epoch: batches an epoch.
        max_tokens: sequences longer than this are refused, by name; None for no limit of our own.
        validation: held-out pairs, a source with an end, which a reward model's accuracy and calibration are of.

    Raises:
        ValueError: as `SupervisedDataModule`; (at set-up, of sources that show all they have) a prompt without a second
            answer, or with twice the same.
    """

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: str,
        rejected_field: str = "rejected",
        batch_size: int = 16,
        batches_per_epoch: int = 100,
        max_tokens: int | None = None,
        validation: PromptSource | None = None,
    ) -> None:
        super().__init__(prompts, tokenizer, batch_size, batches_per_epoch, max_tokens)
        self.rejected_field = rejected_field
        self.validation = None if validation is None else prompt_source(validation, "validation")
        if self.validation is not None and self.validation.size is None:
            raise ValueError("validation: a source without end; set its size")

    def setup(self, stage: str) -> None:
        super().setup(stage)
        module = self.trainer and self.trainer.lightning_module
        if self.validation is not None and not getattr(module, "evaluates_pairs", module is None):
            raise ValueError(
                f"validation has no effect on {type(module).__name__}, only RewardModule has a score of held-out pairs;"
                " remove it from the data"
            )
        for option, source in (("prompts", self.prompts), ("validation", self.validation)):
            self._check(option, () if source is None else source.samples())

    def _check(self, option: str, pairs: Iterable[Prompt]) -> None:
        """Pairs that say nothing are an error before the first step, not at whichever deals them."""
        silent = [one.id for one in pairs if one.solution in ("", self._rejected(one)) or not self._rejected(one)]
        if silent:
            raise ValueError(
                f"{option}: {len(silent)} pairs say nothing, because both answers are the same or one is empty (such as"
                f" {', '.join(map(repr, silent[:3]))}); leave them out of the data"
            )

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """The held-out pairs, in batches as those of training; no loader without any."""
        source = self.validation
        if source is None:
            return []
        assert source.size is not None
        return EvalLoader(ValSet(source.name, "", source, 2, (), 1.0, whole_text), self.batch_size, self._held_out)

    test_dataloader = val_dataloader

    def _held_out(self, held_out: ValSet, first: int, last: int) -> list[Group]:
        if not self.trainer.is_global_zero:
            return []
        return [
            Group(index, prompt.id, 0, self._pair(prompt, index))
            for index, prompt in ((index, held_out.source.deal(index)) for index in range(first, last))
        ]

    def trajectories(self, index: int) -> list[Trajectory]:
        """The chosen and the rejected episode of the pair at stream position `index`."""
        return self._pair(self.prompts.deal(index), index)

    def _rejected(self, prompt: Prompt) -> str:
        where = f"prompt '{prompt.id}'"
        if self.rejected_field not in prompt.metadata:
            raise ValueError(
                f"{where} has no field '{self.rejected_field}' (but {', '.join(prompt.metadata) or 'none'}); set"
                " data.rejected_field to the name of the rejected answer, answer_field to that of the chosen one"
            )
        return reply_text(prompt.metadata[self.rejected_field], where, prompt.conversation())

    def _pair(self, prompt: Prompt, index: int) -> list[Trajectory]:
        answers = ((prompt.solution, 1.0), (self._rejected(prompt), 0.0))
        if answers[0][0] == answers[1][0]:
            raise ValueError(f"prompt '{prompt.id}': chosen and rejected answer are the same; remove the pair")
        return [
            self.imitation(prompt, answer, group=index, episode=2 * index + k, reward=reward)
            for k, (answer, reward) in enumerate(answers)
        ]
