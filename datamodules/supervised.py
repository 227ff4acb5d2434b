"""`SupervisedDataModule`: prompts with their solutions as training sequences, for a supervised (warm) start.

Promises: batch k holds prompts `k * batch_size` to `(k + 1) * batch_size - 1` of the source, whatever the ranks; the
solution and the end-of-sequence token are trained, the prompt is not; the stream goes on over epochs and resumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from app.batch import RolloutBatch, StepHandle, Trajectory
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.tokenizers import encode_prompt, load_tokenizer, texts_of


class SupervisedDataModule(L.LightningDataModule):
    """Imitation of the solutions of a prompt source.

    Args:
        prompts: source of prompts with solutions or answers (a `PromptSource`); its seed decides the order.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.tokenizers`).
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
        for name, value in (
            ("batch_size", batch_size),
            ("batches_per_epoch", batches_per_epoch),
            ("max_tokens", max_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}, must be at least 1")
        if not isinstance(prompts, PromptSource):
            raise ValueError(
                f"prompts: {type(prompts).__name__} is no PromptSource; subclass datamodules.prompts.PromptSource"
            )
        self.prompts = prompts
        self.tokenizer_spec = tokenizer
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self.max_tokens = max_tokens
        self._position = 0  # batches whose last optimizer step has been handed out

    def setup(self, stage: str) -> None:
        if self.tokenizer is not None:
            return
        self.tokenizer = load_tokenizer(self.tokenizer_spec, texts_of(self.prompts))
        trainer = self.trainer
        directory = trainer.log_dir if trainer else None  # asked on every rank: Lightning broadcasts it
        if self.tokenizer_spec.startswith("train:") and trainer and trainer.is_global_zero and directory:
            self.tokenizer.save_pretrained(Path(directory) / "tokenizer")

    def batch(self, position: int) -> RolloutBatch:
        """Batch number `position`, from 0, of the endless stream."""
        first = position * self.batch_size
        positions = range(first, first + self.batch_size)
        return RolloutBatch.from_trajectories(chain.from_iterable(map(self.trajectories, positions)))

    def train_dataloader(self) -> _SupervisedLoader:
        return _SupervisedLoader(self)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._position = state_dict["position"]

    def trajectories(self, index: int) -> list[Trajectory]:
        """The training sequences of the prompt at stream position `index`."""
        prompt = self.prompts.deal(index)
        return [self.imitation(prompt, prompt.solution or prompt.answer, group=index, episode=index)]

    def imitation(self, prompt: Prompt, solution: str, group: int, episode: int, reward: float = 0.0) -> Trajectory:
        """The prompt, then `solution` and the end of sequence, which are trained. Raises ValueError as the class."""
        assert self.tokenizer is not None, "batches come after setup"
        if not solution:
            raise ValueError(f"prompt '{prompt.id}' has neither solution nor answer to imitate; set answer_field")
        given = encode_prompt(self.tokenizer, prompt)
        made = encode_prompt(self.tokenizer, Prompt(id=f"{prompt.id} (solution)", text=solution), bare=True)
        length = len(given) + len(made) + 1
        if self.max_tokens is not None and length > self.max_tokens:
            raise ValueError(
                f"prompt '{prompt.id}' and its solution have {length} tokens, more than max_tokens {self.max_tokens};"
                " raise max_tokens or remove it from the data"
            )
        return Trajectory(
            tokens=torch.tensor([*given, *made, self.tokenizer.eos_token_id]),
            loss_mask=torch.arange(length) >= len(given),
            behavior_logprobs=torch.zeros(length),
            versions=torch.full((length,), -1),
            reward=reward,
            group_id=group,
            episode_id=episode,
            prompt_id=prompt.id,
        )


class _SupervisedLoader:
    """Handles on the stream's next batches; iterating again goes on where the last iteration stopped."""

    def __init__(self, data: SupervisedDataModule) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.batches_per_epoch * self._steps()

    def __iter__(self) -> Iterator[StepHandle]:
        data, count = self._data, self._steps()
        assert data.trainer is not None
        for _ in range(data.batches_per_epoch):
            batch = data.batch(data._position) if data.trainer.is_global_zero else None
            for index in range(count):
                if index == count - 1:  # before the yield: a checkpoint after this step counts the batch as used
                    data._position += 1
                yield StepHandle(batch, index, count)

    def _steps(self) -> int:
        assert self._data.trainer is not None
        steps: int = self._data.trainer.lightning_module.steps_per_batch
        return steps
