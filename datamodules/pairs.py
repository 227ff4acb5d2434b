"""`PairsDataModule`: prompts with a chosen and a rejected answer, for preference optimisation (objective `dpo`).

Promises: a pair is a group of two episodes, first the chosen one with reward 1.0, then the rejected one with 0.0;
batches hold whole pairs; the stream goes on over epochs and resumes, as that of `SupervisedDataModule`. The tree
computes the prompt of a pair, and whatever its answers have in common at their beginning, once.
"""

from __future__ import annotations

from app.batch import Trajectory
from datamodules.prompts.base import PromptSource
from datamodules.prompts.records import reply_text
from datamodules.supervised import SupervisedDataModule


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

    Raises:
        ValueError: as `SupervisedDataModule`; (when dealt) a prompt without a second answer, or with twice the same.
    """

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: str,
        rejected_field: str = "rejected",
        batch_size: int = 16,
        batches_per_epoch: int = 100,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(prompts, tokenizer, batch_size, batches_per_epoch, max_tokens)
        self.rejected_field = rejected_field

    def trajectories(self, index: int) -> list[Trajectory]:
        """The chosen and the rejected episode of the pair at stream position `index`."""
        prompt = self.prompts.deal(index)
        where = f"prompt '{prompt.id}'"
        if self.rejected_field not in prompt.metadata:
            raise ValueError(
                f"{where} has no field '{self.rejected_field}' (but {', '.join(prompt.metadata) or 'none'}); set"
                " data.rejected_field to the name of the rejected answer, answer_field to that of the chosen one"
            )
        rejected = reply_text(prompt.metadata[self.rejected_field], where)
        if rejected == prompt.solution:
            raise ValueError(f"{where}: chosen and rejected answer are the same; remove the pair")
        answers = ((prompt.solution, 1.0), (rejected, 0.0))
        return [
            self.imitation(prompt, answer, group=index, episode=2 * index + k, reward=reward)
            for k, (answer, reward) in enumerate(answers)
        ]
