"""What a workflow and a trainer may ask of an inference engine, whichever one stands behind it.

Promises: token ids in, token ids out, with the log-probability and the policy version of every generated
token; a request that an engine cannot serve is refused before it is sent, by an error naming its field.
Imports torch and transformers for types only, so engines of any kind can be written against it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from datamodules.inference.reply_text import TextStops

if TYPE_CHECKING:
    from socket import socket

    from torch import Tensor
    from transformers import PreTrainedModel

    from app.pictures import Picture
    from app.routes import Routes
    from datamodules.inference.export import WeightParts


class GenerationError(RuntimeError):
    """A request refused or not finished; the message names the field, or what failed, and the remedy."""


@dataclass(frozen=True)
class Shaping:
    """How a reply is drawn otherwise than from the model as it is. What is sampled so cannot be trained on.

    Penalties and biases change the logits, in the order below; of `softmax(logits / temperature)` the others then keep
    a part. Penalties look at the reply alone. SGLang draws a token before it has counted the last one, so that its
    penalties come a token late, and a reply that goes on at another server is counted anew there.

    Attributes:
        top_p: keep the most likely tokens until they have this much probability, in (0, 1].
        top_k: keep so many of the most likely tokens; -1 for all.
        min_p: keep tokens with this share of the most likely one's probability, in [0, 1].
        frequency_penalty, presence_penalty: taken off a token's logit for each time it is in the reply, and once where
            it is; in [-2, 2].
        repetition_penalty: logits of tokens of the reply are divided by it where above 0 and multiplied where below
            (Keskar et al. 2019); in (0, 2].
        logit_bias: token ids and what is added to their logits.
    """

    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that change something."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) != one.default)


SHAPINGS = tuple(one.name for one in fields(Shaping))
"""All names of a `Shaping`."""


@dataclass
class GenerationRequest:
    """One completion to sample.

    Attributes:
        tokens: prompt token ids, at least one, each in `[0, vocab_size)`.
        max_new_tokens: most tokens to generate, at least 1; `len(tokens) + max_new_tokens <= max_context`.
        temperature: tokens are drawn from `softmax(logits / temperature)` over the whole vocabulary (no top-k,
            no top-p: log-probabilities must be those the trainer computes), unless there is `shaping`. 0.0 means
            greedy.
        stop_token_ids: generation ends after the first of them; it stays in the output.
        request_id: name of the request in logs and errors.
        seed: makes this request's draws a function of the seed, its tokens and the weights alone, whatever runs
            beside it. None draws from the engine's own stream, reproducible when requests arrive in the same order.
        stop_texts: generation ends with the token that completes one of them, wherever tokens are cut. All that was
            sampled stays in the response, the stop text and what its last token says behind it included, and is
            trained on; whoever shows the text cuts it where the stop begins (`reply_text.cut_at_stop`).
        decode: token ids to text, special tokens included; `stop_texts` are looked for in what it says. Called in the
            engine's thread, with few tokens at a time. What it raises fails this request alone. Episodes' engines fill
            it in.
        on_tokens: called with the ids and log-probabilities of new tokens as they are sampled, each token once and in
            order, the last before `generate` returns. It is called in the engine's own thread, between two forward
            passes or reports of a server: it must be quick and hand over what takes long (`call_soon_threadsafe`).
            What it raises fails this request alone. Servers' tokens come once their version is certain, so that none
            is taken back: after an update of the weights in mid-request that is at its end.
        shaping: draws otherwise than from the model as it is; None for what can be trained. For engines that name all
            its fields that change something in an attribute `shapings`.
        images: for each token the index of its picture in `pictures`, or -1; None without pictures.
        pictures: distinct ones that the prompt shows, whole. For engines that have a method `use_images`.
        experts_from: asks which experts tokens were sent to, from this one of the prompt on; None does not. For engines
            whose `record_experts` is true.
    """

    tokens: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    request_id: str = ""
    seed: int | None = None
    stop_texts: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = None
    on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None
    shaping: Shaping | None = None
    images: list[int] | None = None
    pictures: tuple[Picture, ...] = ()
    experts_from: int | None = None

    def stops(self) -> TextStops | None:
        """A new search for the stop texts, to be given each token in turn; None for a request without any."""
        return TextStops(self.stop_texts, self._decode) if self.stop_texts and self.decode is not None else None

    def _decode(self, tokens: list[int]) -> str:
        assert self.decode is not None
        try:
            return self.decode(tokens)
        except Exception as error:
            raise GenerationError(f"{self._name}.decode: it raised {type(error).__name__}: {error}") from error

    def tell(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """For engines: calls `on_tokens`, if there is one and something new. Raises GenerationError when that fails."""
        if self.on_tokens is None or not tokens:
            return
        try:
            self.on_tokens(tokens, logprobs)
        except Exception as error:
            raise GenerationError(f"{self._name}.on_tokens: it raised {type(error).__name__}: {error}") from error

    @property
    def _name(self) -> str:
        return f"GenerationRequest '{self.request_id}'" if self.request_id else "GenerationRequest"

    def validate(self, vocab_size: int, max_context: int) -> None:
        """Raises GenerationError, naming the field, when an engine of these limits cannot serve the request."""
        name = self._name
        if len(self.tokens) == 0:
            raise GenerationError(f"{name}.tokens: empty prompt; give at least one token (a BOS token, for example)")
        if min(self.tokens) < 0 or max(self.tokens) >= vocab_size:
            at, bad = next((i, t) for i, t in enumerate(self.tokens) if not 0 <= t < vocab_size)
            raise GenerationError(
                f"{name}.tokens: id {bad} at position {at} is outside the model's vocabulary of {vocab_size};"
                " use the tokenizer that belongs to the model"
            )
        if len(self.images or ()) != (len(self.tokens) if self.pictures else 0):
            raise GenerationError(
                f"{name}.images: {len(self.images or ())} entries for {len(self.tokens)} tokens and"
                f" {len(self.pictures)} pictures; give one a token, and none without pictures"
            )
        if self.max_new_tokens < 1:
            raise GenerationError(f"{name}.max_new_tokens: {self.max_new_tokens}, must be at least 1")
        if len(self.tokens) + self.max_new_tokens > max_context:
            raise GenerationError(
                f"{name}.max_new_tokens: a prompt of {len(self.tokens)} tokens + {self.max_new_tokens} new ones exceed"
                f" the context of {max_context}; shorten the prompt or lower max_new_tokens"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise GenerationError(f"{name}.temperature: {self.temperature}, must be finite and >= 0 (0 means greedy)")
        for stop in self.stop_token_ids:
            if not 0 <= stop < vocab_size:
                raise GenerationError(
                    f"{name}.stop_token_ids: id {stop} is outside the model's vocabulary of {vocab_size}"
                )
        for token, _ in () if self.shaping is None else self.shaping.logit_bias:
            if not 0 <= token < vocab_size:
                raise GenerationError(
                    f"{name}.shaping.logit_bias: id {token} is outside the vocabulary of {vocab_size}"
                )
        if self.experts_from is not None and not 0 <= self.experts_from <= len(self.tokens):
            raise GenerationError(f"{name}.experts_from: {self.experts_from}, must be 0 to the prompt's length")
        if "" in self.stop_texts:
            raise GenerationError(f"{name}.stop_texts: an empty text ends every reply; leave it out")
        if self.stop_texts and self.decode is None:
            raise GenerationError(f"{name}.decode: stop_texts are looked for in text; give the tokenizer's decode")


@dataclass
class GenerationResponse:
    """What an engine sampled for one request; the three lists have one entry per generated token.

    Attributes:
        tokens: generated ids without the prompt; a stop token, or the one that completes a stop text, is the last.
        logprobs: log-probability of each token in nats under `softmax(logits / temperature)` of the weights of its
            version (temperature 1 for greedy requests); of requests with `shaping` not renormalised for what is kept.
        versions: policy version whose weights generated each token, never decreasing.
        finish_reason: "stop" (a stop token or text), "length" (max_new_tokens reached) or "abort" (ended early by the
            engine; the tokens so far are returned).
        experts: where `experts_from` asked, uint8 or int16 [n, layers, k] on the CPU: the experts of each layer that
            has any, first to last, that tokens of prompt and reply were sent to, from that one on; not of the last,
            which no forward has seen. Each token's are those of the forward that drew its successor, or of a later
            one where weights changed in mid-request (SGLang reads a request anew then).
        routes: the same for all tokens of prompt and reply. Episodes' engines fill it in.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    experts: Tensor | None = None
    routes: Routes | None = None


@dataclass
class WeightUpdate:
    """New weights for an engine: exactly one of `state_dict`, `parts` and `path`.

    Attributes:
        version: policy version of these weights; greater than the engine's current one.
        state_dict: complete, by the engine's names: method "memory" takes those of the base model's own `state_dict()`
            (`export.merged_weights`), "distributed" and "tensor" those of a checkpoint (`export.checkpoint_weights`).
            The engine copies the tensors before `update_weights` returns and keeps no reference.
        parts: for method "memory", where they are nowhere whole: gone through before `update_weights` returns.
        path: for method "disk", a directory written by `save_pretrained` or `WeightFiles`; for method "adapter", one of
            a PEFT adapter alone. It stays until the engine has newer weights: a server that comes late loads it too.
            For methods "distributed" and "tensor" it is read here and sent, to servers that need not see it
            (`read_here`).
        deadline_s: seconds the engine may take; above 0.
        shared: for method "tensor", servers on this host read what is sent from memory that they share with us.
    """

    version: int
    state_dict: dict[str, Tensor] | None = None
    path: str | None = None
    deadline_s: float = 300.0
    parts: WeightParts | None = None
    read_here: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.state_dict, self.path, self.parts)) != 1:
            raise ValueError("WeightUpdate: give exactly one of state_dict, parts and path")
        if self.read_here and self.path is None:
            raise ValueError("WeightUpdate.read_here: there is no path to read; give one, or leave it out")
        if self.shared and self.state_dict is None and not self.read_here:
            raise ValueError("WeightUpdate.shared: nothing is sent; give state_dict, or a path and read_here")
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"WeightUpdate.deadline_s: {self.deadline_s}, must be above 0 and finite")


class InferenceEngine(ABC):
    """Generates from a copy of the policy and takes new weights while doing so. Safe to call from any thread. Any class
    with its methods counts as one, without inheriting from this.

    One that honours fields of `GenerationRequest.shaping` names them in an attribute `shapings`; one without it is sent
    no request that has any. One that shows pictures has a method `use_images(processor)`, called before `start` with
    the model's `ImageProcessor`. One that can say which experts it chose has an option `record_experts`, and answers
    requests with `experts_from` where that is true. One that knows for how long it stood still, in pauses and updates,
    has a number `still_s` of seconds, those of what is under way included, by which deadlines of episodes go.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version of the weights that generate the next token."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids below it may be sent. GenerationError before `start`."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """Most tokens, prompt and output together, of one request. GenerationError before `start`."""

    @property
    @abstractmethod
    def update_methods(self) -> tuple[str, ...]:
        """Ways it takes new weights, the preferred one first: of "memory", "distributed", "disk", "tensor" and
        "adapter"."""

    @abstractmethod
    def start(self, model: PreTrainedModel, version: int, seed: int, parts: WeightParts | None = None) -> None:
        """Called once, on global rank 0, before the first request; the trainer's `model` is left untouched.

        `parts`: its weights, where `model` has no storage, since ranks hold shards of them; gone through, or not at
        all.

        An engine in other processes may come up without the weights of `model`: its `version` is then -1, and the
        caller brings them with a first `update_weights`, before the first request.

        Raises GenerationError when the engine already runs or cannot serve this model.
        """

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        """Samples one completion; callable from any event loop, many at a time.

        A weight update in between does not end it: the tokens after it come from the new weights, all their keys
        and values included. Cancelling the awaiting task frees its place in the engine.

        Raises GenerationError: invalid request (names the field), engine not running or failed, deadline passed.
        """

    @abstractmethod
    def pause(self) -> None:
        """Returns when no forward pass runs and none will start; requests wait, they do not fail."""

    @abstractmethod
    def resume(self) -> None:
        """Continues after `pause`; without one it does nothing."""

    @abstractmethod
    def update_weights(self, update: WeightUpdate) -> float:
        """Pauses, loads, flushes all cached keys and values, continues (stays paused if it was paused).

        Returns the seconds during which nothing was generated. Raises GenerationError, with the old weights still
        serving, when names or shapes do not fit, or when the version does not rise.
        """

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Plain values: at least `alive`, `paused`, `version`, `running`, `waiting`, and `error` ("" if none)."""

    @abstractmethod
    def close(self) -> None:
        """Fails whatever is pending with GenerationError, ends threads or connections, frees memory; idempotent."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        # By their names: for a Protocol, jsonargparse asks for our annotations too, and reads them anew for each value.
        if cls is not InferenceEngine:  # an engine's own class, which is asked for its subclasses
            return NotImplemented
        methods = (name for name, value in vars(cls).items() if name[0] != "_" and callable(value))
        return all(callable(getattr(other, name, None)) for name in methods)


@dataclass(frozen=True)
class Invitation:
    """Where some ranks reach rank 0, to send weights beside it.

    Attributes:
        address, port: where rank 0 listens.
        token: who knows it is answered.
        ranks: that are asked to come.
    """

    address: str
    port: int
    token: str
    ranks: tuple[int, ...]


class WeightSenders(Protocol):
    """Ranks that send weights by method "distributed" together with rank 0, each to servers of its own."""

    def invite(
        self, ranks: int, local_ranks: int, most: int | None, address: str, listen: Callable[[], socket]
    ) -> Invitation | None:
        """On rank 0, after its engine's start; None where it sends alone.

        Args:
            ranks, local_ranks: of the run, and of them on rank 0's machine, which are the first.
            most: ranks that send, rank 0 included; None: as many as there are servers.
            address: by which other ranks know this machine.
            listen: opens a socket that they reach there.
        """

    def join(self, invitation: Invitation, rank: int) -> bool:
        """On another rank: whether it was asked to come, and to `lend` every version from now on. Does nothing where it
        has joined already. Raises GenerationError when rank 0 is not reached."""

    def lend(self, version: int, weights: Callable[[], dict[str, Tensor]] | None, deadline_s: float) -> None:
        """On another rank: holds a version still until rank 0 has brought it to the servers.

        Args:
            weights: makes what rank 0 has in `WeightUpdate.state_dict`; None where that has a `path`.

        Raises GenerationError when rank 0 is not done in time; returns when its connection is lost.
        """

    def leave(self) -> None:
        """On another rank: ends what `join` began. Idempotent."""


class ServerEngine(ABC):
    """What an engine offers besides when servers generate for it: a base class, asked for with `isinstance`.

    Its methods may be called from any thread.

    Attributes:
        in_turns: its servers share the trainer's GPUs, and have to be paused while it computes there.
        senders: for ranks that send weights beside rank 0, if it has a use for them.
    """

    in_turns: bool = False
    senders: WeightSenders | None = None

    @property
    @abstractmethod
    def owns_servers(self) -> bool:
        """Whether it started its servers, so that `restart` can help. Known before `start`."""

    @abstractmethod
    def where(self, request_id: str) -> str:
        """The server that works on the request now; "" when it is at none, or unknown. Never blocks."""

    @abstractmethod
    def restart(self, server: str) -> None:
        """Ends the server and starts it again; what it worked on goes on elsewhere, or there once it is back.

        Raises GenerationError, with the reason, when this server cannot be restarted by us. Bounded by a deadline.
        """


@runtime_checkable
class RolloutData(Protocol):
    """A datamodule that rolls out, as callbacks use it; its methods are for global rank 0.

    Attributes:
        val_sets: the sets of held-out prompts.
    """

    engine: InferenceEngine
    val_sets: Sequence[Any]

    def start(self, model: PreTrainedModel, version: int, parts: WeightParts | None = None) -> None:
        """Starts the engine, and whatever uses it, with these weights (see `InferenceEngine.start`); does nothing where
        they run already."""

    def publish(self, version: int) -> None:
        """The engine serves `version` from now on."""

    def counters(self) -> dict[str, int]:
        """Where the groups of the stream are, by name."""

    def tally(self) -> dict[str, float]:
        """What the groups were worth that finished since this was last asked, by name."""

    def diagnose(self) -> str:
        """For a run that hangs: what is pending where. From any thread."""
