"""`SupervisedDataModule`: prompts with their solutions as training sequences, for a supervised (warm) start; and
`PairsDataModule`: prompts with a chosen and a rejected answer, for preference optimisation (objective `dpo`).

Promises: batch k holds prompts `k * batch_size` to `(k + 1) * batch_size - 1` of the source, whatever the ranks; the
solution and the one token that ends it are trained, the prompt is not; what cannot be trained is refused before the
first step, as far as a source shows what it has; the stream goes on over epochs and resumes, there behind the last
prompt that was dealt, also with another `batch_size`. A pair is a group of two episodes, first the chosen one with
reward 1.0, then the rejected one with 0.0; batches hold whole pairs, and the tree computes the prompt of a pair, and
whatever its answers have in common at their beginning, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import RolloutBatch, Trajectory
from datamodules.answers import whole_text
from datamodules.conversations.chat_template import Chat
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.groups import Group
from datamodules.pipeline import fingerprint
from datamodules.pipeline.loaders import EvalLoader, Played, Position, StepLoader
from datamodules.pipeline.validation import ValSet
from datamodules.prompts.base import Prompt, PromptSource, prompt_source
from datamodules.prompts.dealer import encoded
from datamodules.prompts.records import reply_text
from datamodules.prompts.tokenizers import encode_prompt, encode_reply, load_tokenizer, texts_of

_ENDLESS = 100  # batches an epoch of a source without end, unless told


class SupervisedDataModule(L.LightningDataModule):
    """Imitation of the solutions of a prompt source.

    Args:
        prompts: source of prompts with solutions or answers (a `PromptSource`); its seed decides the order.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.prompts.tokenizers`).
        batch_size: sequences a batch, over all ranks.
        batches_per_epoch: batches an epoch; None makes an epoch one pass over the prompts (its last batch goes on with
            the next pass), or 100 batches of a source without end.
        max_tokens: sequences longer than this are refused, by name; None for no limit but the model's context.
        validation: held-out prompts with solutions, a source with an end, whose loss is `val/loss` of `SFTModule`.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`: those of the
            workflow that the model is to go on with.

    Of a prompt's metadata (the other fields of a record) `tools`, JSON schemas as a list or its JSON text, are shown by
    the chat template, and `chat_template_kwargs` are further arguments of it for this prompt.

    Raises:
        ValueError: an argument out of range; (before the first step, and when dealt) a prompt without solution, too
            long, or that the tokenizer has no tokens for; a solution that spells what ends a reply, or that leaves a
            thought open which the chat template begins.
    """

    evaluated_by: ClassVar = ("evaluates_answers", "SFTModule has a loss of held-out answers")
    """What a module that `validation` is for says of itself, and for whom it is not."""
    episodes: ClassVar = 1
    """Of a prompt."""

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: str,
        batch_size: int = 64,
        batches_per_epoch: int | None = None,
        max_tokens: int | None = None,
        validation: PromptSource | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        counts = {"batch_size": batch_size, "batches_per_epoch": batches_per_epoch, "max_tokens": max_tokens}
        checks.at_least(1, counts)
        self.prompts = prompt_source(prompts, "prompts")
        self.tokenizer_spec = tokenizer
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.image_processor: ImageProcessor | None = None
        self.batch_size = batch_size
        size = self.prompts.size
        self.batches_per_epoch = batches_per_epoch or (_ENDLESS if size is None else -(-size // batch_size))
        self.max_tokens = max_tokens
        self.validation = None if validation is None else prompt_source(validation, "validation")
        if self.validation is not None and self.validation.size is None:
            raise ValueError("validation: a source without end; set its size")
        self.template_options = template_options
        self._position = Position(self._end)
        self._made_with = {"batch_size": str(batch_size), "template_options": str(template_options)}

    def setup(self, stage: str) -> None:
        module, (trait, who) = self.trainer and self.trainer.lightning_module, self.evaluated_by
        if self.validation is not None and not getattr(module, trait, module is None):
            raise ValueError(
                f"validation has no effect on {type(module).__name__}, only {who}; remove it from the data"
            )
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
        return self._of(range(position * self.batch_size, (position + 1) * self.batch_size))

    def _end(self, first: int) -> int:
        return first + self.batch_size

    def _of(self, positions: range) -> RolloutBatch:
        return RolloutBatch.from_trajectories(chain.from_iterable(map(self.trajectories, positions)))

    @cached_property
    def _chat(self) -> Chat | None:
        assert self.tokenizer is not None
        return Chat(self.tokenizer, None, self.template_options) if self.tokenizer.chat_template else None

    def train_dataloader(self) -> StepLoader:
        self._check_samples("prompts", self.prompts)
        return StepLoader(self)

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """The held-out prompts, in batches as those of training; no loader without any."""
        source = self.validation
        if source is None:
            return []
        assert source.size is not None
        self._check_samples("validation", source)
        self._check_apart(source)
        held_out = ValSet(source.name, "", source, self.episodes, (), 1.0, whole_text)
        return EvalLoader(held_out, self.batch_size, self._held_out)

    test_dataloader = val_dataloader

    def _held_out(self, held_out: ValSet, first: int, last: int) -> Played:
        assert self.trainer is not None
        if not self.trainer.is_global_zero:
            return [], 0
        groups = [
            Group(index, prompt.id, 0, self.sequences(prompt, index))
            for index, prompt in ((index, held_out.source.deal(index)) for index in range(first, last))
        ]
        return groups, len(groups)

    def _check_samples(self, option: str, source: PromptSource) -> None:
        """What cannot be trained is an error before the first step, not hours later at whichever batch deals it."""
        policy = getattr(self.trainer and self.trainer.lightning_module, "policy", None)
        context = None if policy is None else policy.config.get_text_config()
        longest = getattr(context, "max_position_embeddings", None)
        too_long: list[str] = []
        leads = rank_zero_only.rank == 0
        shown = {"desc": option, "unit": " prompts", "delay": 2.0, "leave": False, "disable": None if leads else True}
        for index, prompt in enumerate(tqdm(source.samples(), total=source.size, **shown)):
            lengths = [len(one.tokens) for one in self.sequences(prompt, index)]
            too_long += [prompt.id] if longest is not None and max(lengths) > longest else []
        if too_long:
            raise ValueError(
                f"{option}: {len(too_long)} prompts and their answers have more tokens than the model's"
                f" max_position_embeddings of {longest} (such as {', '.join(map(repr, too_long[:3]))}); leave them out"
                " of the data, shorten them, or use a model with a longer context"
            )

    @property
    def groups_per_batch(self) -> tuple[str, int]:
        """The option that says how many groups a batch holds, and its value."""
        return "batch_size", self.batch_size

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return self._position.is_under_way(version)

    def hand_out(self, version: int) -> RolloutBatch | None:
        """See `BatchStream`."""
        positions = self._position.hand_out(version)
        assert self.trainer is not None
        return self._of(positions) if self.trainer.is_global_zero else None

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        position = self._position.state_dict(self.trainer.lightning_module.policy_version)
        return {**position, fingerprint.KEY: dict(self._made_with)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Warns of another stream's settings. Raises ValueError where it was made with another tokenizer."""
        fingerprint.compare(state_dict, self._made_with, fingerprint.EXAMPLES, self.trainer)
        size = int(state_dict.get(fingerprint.KEY, {}).get("batch_size", self.batch_size))
        self._position.load_state_dict(state_dict, lambda number: number * size)

    def trajectories(self, index: int) -> list[Trajectory]:
        """The training sequences of the prompt at stream position `index`."""
        return self.sequences(self.prompts.deal(index), index)

    def sequences(self, prompt: Prompt, index: int) -> list[Trajectory]:
        """The training sequences of a prompt at position `index` of its source."""
        return [self.imitation(prompt, prompt.solution or prompt.answer, group=index, episode=index)]

    def imitation(self, prompt: Prompt, solution: str, group: int, episode: int, reward: float = 0.0) -> Trajectory:
        """The prompt, then `solution` and what ends it, which are trained. Raises ValueError as the class.

        A chat's end is that of the chat template, where it has one; a text's is the tokenizer's end of sequence.
        """
        assert self.tokenizer is not None, "batches come after setup"
        if not solution:
            raise ValueError(f"prompt '{prompt.id}' has neither solution nor answer to imitate; set answer_field")
        encode = partial(encode_prompt, self.tokenizer, template_options=self.template_options)
        told = encoded(prompt, encode, self.image_processor)
        said, end = self._said(prompt, told.tokens, solution), None if self._chat is None else self._chat.end
        given, made = told.tokens, encode_reply(self.tokenizer, prompt, said, end, self.template_options)
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

    def _check_apart(self, held_out: PromptSource) -> None:
        """A held-out loss on what is trained falls whatever is learnt. Pictures are not compared."""
        trained = {(one.text, repr(one.messages)) for one in self.prompts.samples() if not one.pictures}
        both = [one.id for one in held_out.samples() if (one.text, repr(one.messages)) in trained and not one.pictures]
        if both:
            rank_zero_warn(
                f"validation: {len(both)} of {held_out.size} prompts are trained on as well (such as"
                f" {', '.join(map(repr, both[:3]))}), so its numbers flatter the model; part the data, by size of the"
                " one source and offset of the other if it is one file"
            )

    def _said(self, prompt: Prompt, given: Sequence[int], solution: str) -> str:
        """What the model itself says of a solution behind these tokens. Raises ValueError as the class."""
        assert self.tokenizer is not None
        if self.image_processor is not None:  # a reply that samples a placeholder is thrown away
            solution = self.image_processor.quoted(solution)
        chat = self._chat if prompt.messages else None
        ends = [self.tokenizer.eos_token] if chat is None else chat.turns
        spelled = next((token for token in ends if token in solution), None)
        if spelled is not None:
            raise ValueError(
                f"prompt '{prompt.id}': its answer spells '{spelled}', at which a reply is over, and which is put"
                " behind it anyway; remove it from the answer"
            )
        if chat is None or not chat.opened(given):
            return solution
        if "</think>" not in solution:
            raise ValueError(
                f"prompt '{prompt.id}': the chat template begins a thought, and its answer ends none, so all of it"
                " would be trained as one; write the thought into the answer (<think>...</think>, which may be empty),"
                " or tell the template by data.template_options to begin none"
            )
        line = str(self.tokenizer.decode(list(given[-1:]))).isspace()
        rest = solution.lstrip().removeprefix("<think>")
        return rest.lstrip() if line else rest


class PairsDataModule(SupervisedDataModule):
    """Pairs of answers. The chosen one is the prompt's solution: `answer_field: chosen` of any prompt source.

    Args:
        prompts: source of prompts with both answers (a `PromptSource`); its seed decides the order.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.prompts.tokenizers`).
        rejected_field: key of the prompt's metadata with the other answer, as text or as chat messages whose last is
            the answer.
        batch_size: pairs a batch, over all ranks.
        batches_per_epoch: batches an epoch; None for one pass over the pairs, as in `SupervisedDataModule`.
        max_tokens: sequences longer than this are refused, by name; None for no limit but the model's context.
        validation: held-out pairs, a source with an end, which a reward model's accuracy and calibration are of.
        template_options: see `SupervisedDataModule`; of a reward model those of the judge, too
            (`datamodules.rewards.judges.RewardModel`).

    Raises:
        ValueError: as `SupervisedDataModule`; (at set-up, of sources that show all they have) a prompt without a second
            answer, or with twice the same.
    """

    evaluated_by: ClassVar = ("evaluates_pairs", "RewardModule has a score of held-out pairs")
    episodes: ClassVar = 2

    def __init__(
        self,
        prompts: PromptSource,
        tokenizer: str,
        rejected_field: str = "rejected",
        batch_size: int = 16,
        batches_per_epoch: int | None = None,
        max_tokens: int | None = None,
        validation: PromptSource | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(prompts, tokenizer, batch_size, batches_per_epoch, max_tokens, validation, template_options)
        self.rejected_field = rejected_field
        self._made_with["rejected_field"] = rejected_field

    def setup(self, stage: str) -> None:
        super().setup(stage)
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

    def _rejected(self, prompt: Prompt) -> str:
        where = f"prompt '{prompt.id}'"
        if self.rejected_field not in prompt.metadata:
            raise ValueError(
                f"{where} has no field '{self.rejected_field}' (but {', '.join(prompt.metadata) or 'none'}); set"
                " data.rejected_field to the name of the rejected answer, answer_field to that of the chosen one"
            )
        return reply_text(prompt.metadata[self.rejected_field], where, prompt.conversation())

    def sequences(self, prompt: Prompt, index: int) -> list[Trajectory]:
        """The chosen and the rejected episode of a pair at position `index` of its source."""
        answers = ((prompt.solution, 1.0), (self._rejected(prompt), 0.0))
        if answers[0][0] == answers[1][0]:
            raise ValueError(f"prompt '{prompt.id}': chosen and rejected answer are the same; remove the pair")
        return [
            self.imitation(prompt, answer, group=index, episode=2 * index + k, reward=reward)
            for k, (answer, reward) in enumerate(answers)
        ]
