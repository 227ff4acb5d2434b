"""What workflows of several turns share: how replies are sampled, and the tokens of an episode as they were served.

Promises: nothing generated is ever re-tokenized: the next request sends the ids of the last one, the generated ids, and
whatever was appended to them; only those three make up training sequences, each generated token with the
log-probability and version the engine gave it. A conversation that fills the model's context ends with finish reason
"length", without an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from app.pictures import Picture, merged, shown, used
from datamodules.conversations.chat_template import Message
from datamodules.conversations.image_processor import ImageProcessor, distinct
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine

Sequences = Literal["whole", "turns", "rendered"]
"""What of an episode becomes training sequences:

    whole     one sequence, with loss on every generated token
    turns     one a turn: everything before it as it was served, then the turn, with loss on that
    rendered  one a turn, its prompt rendered anew from the messages so far by the chat template, which may leave out
              what it likes (thoughts of earlier turns): what was generated is trained as generated, and what later
              turns see of it is the template's text, tokenized again

Whichever it is, an episode counts once in advantages and in the loss (`modules.objectives.aggregation`; token_mean
counts its tokens). What `sequence_mean`, GSPO and corrections of sequences call a sequence is the whole episode in the
first and a turn in the others.
"""


_LONG = 1 << 13  # characters; some ms of work


class ReplyOptions:
    """How one reply is sampled.

    Args:
        owner: class that was configured, for errors.
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, within `app.batch.TEMPERATURES`.
        stop: texts, besides what ends a turn anyway (see `datamodules.workflows.turn_ends`), that end a reply (each
            must be one token).

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, owner: str, max_new_tokens: int, temperature: float, stop: Sequence[str] = ()) -> None:
        checks.at_least(1, {f"{owner}.max_new_tokens": max_new_tokens})
        alike = "; greedy samples of one prompt would all be alike (validation has a temperature of its own)"
        checks.temperature(f"{owner}.temperature", temperature, greedy=False, remedy=alike)
        self.owner = owner
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.stop = tuple(stop)
        self.stop_ids: tuple[int, ...] = ()

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the stop tokens. Raises ValueError for a stop text that is not one token."""
        found = [tokenizer.eos_token_id]
        for text in self.stop:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) != 1:
                raise ValueError(
                    f"{self.owner}.stop: {text!r} is {len(tokens)} tokens; a reply can only end at one token"
                )
            found += tokens
        self.stop_ids = tuple(dict.fromkeys(found))

    def request(
        self,
        tokens: Sequence[int],
        most: int | None = None,
        images: Sequence[int] = (),
        pictures: Sequence[Picture] = (),
    ) -> GenerationRequest:
        """A request for a reply to `tokens`, of `most` tokens where that is less than `max_new_tokens`. `images`: for
        each token the index of its picture, or -1; empty without pictures."""
        count = self.max_new_tokens if most is None else min(most, self.max_new_tokens)
        return GenerationRequest(
            list(tokens),
            max_new_tokens=count,
            temperature=self.temperature,
            stop_token_ids=self.stop_ids,
            images=list(images) if pictures else None,
            pictures=tuple(pictures),
        )


@dataclass
class _Turn:
    start: int  # of its tokens in the sequence
    response: GenerationResponse
    temperature: float
    finish_reason: str


class Turns:
    """The conversation of one episode in token ids.

    Args:
        prompt: of the episode.
        options: of its replies.
        tokens: what the first request sends; None for the prompt's own.

    Attributes:
        tokens: what the next request will send.
        images, pictures: the picture of each of them, or -1; and what it is an index of.
        count: turns generated.
        end: the token that ended the last reply; None where it was cut off.
    """

    def __init__(self, prompt: Prompt, options: ReplyOptions, tokens: Sequence[int] | None = None) -> None:
        self.tokens = list(prompt.tokens if tokens is None else tokens)
        own = tokens is None and bool(prompt.pictures)
        self.images = list(prompt.images) if own else [-1] * len(self.tokens)
        self.pictures: tuple[Picture, ...] = prompt.pictures if own else ()
        self.count = 0
        self.end: int | None = None
        self._prompt = prompt
        self._options = options
        self._turns: list[_Turn] = []  # whose tokens are in `tokens`
        self._reply: list[int] = []  # the last one's tokens
        self._is_over = False  # whether the last of these ends a turn, and is no text
        self._closed: list[Trajectory] = []  # of turns before the conversation was rewritten

    @property
    def finish_reason(self) -> str:
        """Why the last reply ended, or what ended the episode after it, where that was set."""
        last = self._turns or self._closed
        return last[-1].finish_reason if last else ""

    @finish_reason.setter
    def finish_reason(self, value: str) -> None:
        (self._turns or self._closed)[-1].finish_reason = value

    async def generate(self, engine: EpisodeEngine, most: int | None = None) -> GenerationResponse | None:
        """One more reply, of at most `most` tokens and what is left of the context.

        Returns None, with finish reason "length", when nothing is left of it.

        Raises:
            GenerationError: as the engine.
            ValueError: the first reply already has no room.
        """
        room = engine.max_context - len(self.tokens)
        if room < 1:
            if self.count == 0:
                raise ValueError(
                    f"prompt '{self._prompt.id}': its {len(self.tokens)} tokens leave no room for a reply in the"
                    f" context of {engine.max_context}; shorten it, or use a model with a longer context"
                )
            self.finish_reason = "length"
            return None
        count = room if most is None else min(room, most)
        request = self._options.request(self.tokens, count, self.images, self.pictures)
        response = await engine.generate(request)
        self._turns.append(_Turn(len(self.tokens), response, request.temperature or 1.0, response.finish_reason))
        self.tokens += response.tokens
        self.images += [-1] * len(response.tokens)
        self.count += 1
        self._reply = response.tokens
        # The engine has completed the request's stop tokens by what ends a turn of this model.
        self.end = next((token for token in response.tokens[-1:] if token in request.stop_token_ids), None)
        self._is_over = self.end in engine.ends.ids
        return response

    def reply(self, tokenizer: PreTrainedTokenizerBase, special: bool = False) -> str:
        """The last reply as text, without what ends a turn (a token of `stop` is part of what was said); `special`:
        with special tokens it contains."""
        kept = self._reply[:-1] if self._is_over else self._reply
        return str(tokenizer.decode(list(kept), skip_special_tokens=not special))

    def extend(self, tokens: Sequence[int], images: Sequence[int] = (), pictures: Sequence[Picture] = ()) -> None:
        """Appends what the model is told next, or shown: `images` has the index of each token's picture, or -1."""
        column, self.pictures = merged(
            [
                (torch.tensor(self.images, dtype=torch.int32), self.pictures, len(self.tokens)),
                (torch.tensor(images, dtype=torch.int32) if pictures else None, pictures, len(tokens)),
            ]
        )
        self.tokens += tokens
        self.images = [-1] * len(self.tokens) if column is None else column.tolist()

    def rewrite(self, tokens: Sequence[int], processor: ImageProcessor | None) -> None:
        """Goes on from another rendering of the conversation; the turns so far are sequences of their own.

        Args:
            tokens: with one placeholder for each picture of the prompt.
            processor: the model's.

        Raises:
            PictureError: the rendering does not show the pictures of the prompt, as `ImageProcessor.expanded` says.
        """
        self._closed += self._by_turn()
        self._turns = []
        pictures = shown(self._prompt.images, self._prompt.pictures)
        images: Sequence[int] = [-1] * len(tokens)
        if pictures and processor is not None:
            tokens, images = processor.expanded(tokens, pictures, f"prompt '{self._prompt.id}', rendered anew")
        self.tokens, self.images, self.pictures = list(tokens), list(images), distinct(pictures)

    def trajectories(self, sequences: Sequences, reward: float, metadata: dict[str, object]) -> list[Trajectory]:
        """The training sequences of the episode, each with its reward and metadata."""
        if sequences == "whole":
            found = [self._sequence(self._turns, 0)]
        else:
            found = [*self._closed, *self._by_turn()]
        for one in found:
            one.reward = reward
            one.metadata = {**metadata, "turns": self.count}
        return found

    def _by_turn(self) -> list[Trajectory]:
        return [self._sequence([turn], len(self._closed) + k) for k, turn in enumerate(self._turns)]

    def _sequence(self, turns: Sequence[_Turn], index: int) -> Trajectory:
        """Everything up to the end of the last of these turns, all of them trained."""
        length = turns[-1].start + len(turns[-1].response.tokens)
        mask = torch.zeros(length, dtype=torch.bool)
        logprobs = torch.zeros(length, dtype=torch.float32)
        versions = torch.full((length,), -1)
        for turn in turns:
            made = slice(turn.start, turn.start + len(turn.response.tokens))
            mask[made] = True
            logprobs[made] = torch.tensor(turn.response.logprobs, dtype=torch.float32)
            versions[made] = torch.tensor(turn.response.versions)
        images, pictures = used(torch.tensor(self.images[:length], dtype=torch.int32), self.pictures)
        return Trajectory(
            images=images,
            pictures=pictures,
            routes=turns[-1].response.routes,
            tokens=torch.tensor(self.tokens[:length]),
            loss_mask=mask,
            behavior_logprobs=logprobs,
            versions=versions,
            reward=0.0,
            group_id=0,
            episode_id=0,
            turn_index=index,
            prompt_id=self._prompt.id,
            finish_reason=turns[-1].finish_reason,
            temperature=turns[-1].temperature,
        )


async def tokenized(make: Callable[[list[Message]], list[int]], messages: list[Message]) -> list[int]:
    """What `make` makes of the messages; of long ones on a thread, while other episodes go on."""
    if sum(len(str(one["content"])) for one in messages) < _LONG:
        return make(messages)
    return await asyncio.to_thread(make, messages)
