"""A reward model as a reward: what `modules.RewardModule` trains, or any sequence classifier with one label.

Promises: a reply is scored at the token that ends it, in the tokens that training gave it; what spells a control token
in a reply is text; what is too long or cannot be scored is a failed reward and never a number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from app import checks
from app.text import well_formed
from datamodules.conversations.chat_template import Chat, Message
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import encode_prompt, encode_reply, load_tokenizer
from datamodules.rewards.judges.base import Judge, Verdict
from datamodules.rewards.judges.material import harmless
from datamodules.rewards.judges.model import JudgeError
from datamodules.rewards.judges.scoring import LocalScores, Scorer, ServerScores

_DTYPES = ("float32", "bfloat16", "float16")


class RewardModel(Judge):
    """Scores replies with a reward model.

    A text is scored behind its prompt, as `PairsDataModule` makes its pairs; a transcript (`judged: transcript` of
    agents) as its chat template renders it, at the end of the last call. Scores of Bradley and Terry's loss mean
    something in comparison alone: of two replies to one prompt, sigmoid(difference) is the chance that the first is the
    better one. Advantages from groups need no more.

    Args:
        path: directory of the model, with its tokenizer. Without `url` it runs here, in a process of its own.
        url: "http://host:port" of an SGLang server that serves it (`--is-embedding`); token ids are made here.
        key_variable: environment variable with that server's key; None for "ARBORIST_SGLANG_API_KEY". With `url` only.
        max_concurrent: most requests in flight; None for 32. With `url` only.
        bounded: the reward is sigmoid(score), from 0 to 1, and the score itself the part `score`.
        turn_weight: what each call of a transcript but the last earns by its own score, times this, at its end (a
            process reward, which reaches advantages as rewards of single calls do); 0.0 scores the last alone.
        max_tokens: longer conversations are refused; None for the positions of the model.
        batch_tokens: most tokens of a batch; None for 16,384. Not with `url`.
        deadline_s: seconds a batch may take, or with `url` a score.
        device: of the model; None for "cpu". Not with `url`.
        dtype: of its weights; None for "float32". Not with `url`.
        num_threads: CPU threads of an operation; None for 1. Not with `url`.
        memory_mb: most memory of its process, in 10^6 bytes; None for a quarter of the machine's. Not with `url`.
        template_options: further arguments of the chat template: those of the data that it was trained on.
        verifier: a plain reward beside the model's; see `Judge`. `drift` needs scores of its scale: set `bounded`.

    Raises:
        ValueError: an option out of range or without effect; no tokenizer or no model there.
    """

    def __init__(
        self,
        path: str,
        url: str | None = None,
        key_variable: str | None = None,
        max_concurrent: int | None = None,
        bounded: bool = False,
        turn_weight: float = 0.0,
        max_tokens: int | None = None,
        batch_tokens: int | None = None,
        deadline_s: float = 120.0,
        device: str | None = None,
        dtype: str | None = None,
        num_threads: int | None = None,
        memory_mb: float | None = None,
        template_options: dict[str, Any] | None = None,
        verifier: Callable[[Prompt, str], float] | None = None,
    ) -> None:
        name = "RewardModel"
        ours: dict[str, object] = {
            f"{name}.batch_tokens": batch_tokens,
            f"{name}.device": device,
            f"{name}.dtype": dtype,
            f"{name}.num_threads": num_threads,
            f"{name}.memory_mb": memory_mb,
        }
        theirs = {f"{name}.key_variable": key_variable, f"{name}.max_concurrent": max_concurrent}
        if url is None:
            checks.no_effect("without url", theirs)
        else:
            checks.no_effect("with url, where the server decides", ours)
        whole = {"max_concurrent": max_concurrent, "max_tokens": max_tokens, "batch_tokens": batch_tokens}
        checks.at_least(1, {f"{name}.{key}": value for key, value in {**whole, "num_threads": num_threads}.items()})
        checks.at_least(0, {f"{name}.turn_weight": turn_weight})
        checks.positive({f"{name}.memory_mb": memory_mb})
        checks.deadline({f"{name}.deadline_s": deadline_s})
        checks.one_of(f"{name}.dtype", dtype or "float32", _DTYPES)
        try:
            config = AutoConfig.from_pretrained(Path(path).expanduser(), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}.path: '{path}' holds no model: {error}") from error
        self.verifier = verifier
        self._tokenizer = load_tokenizer(path)
        self._template_options = template_options
        self._chat = Chat(self._tokenizer, None, template_options) if self._tokenizer.chat_template else None
        self._bounded, self._turn_weight = bounded, turn_weight
        self._max_tokens = max_tokens or getattr(config.get_text_config(), "max_position_embeddings", None)
        self._deadline_s = deadline_s
        self._server = None if url is None else (url, key_variable or "ARBORIST_SGLANG_API_KEY", max_concurrent or 32)
        self._scorer = Scorer(path, dtype or "float32", device or "cpu", num_threads or 1)
        self._batch_tokens, self._memory_mb = batch_tokens or 16_384, memory_mb

    def client(self) -> LocalScores | ServerScores:
        if self._server is None:
            return LocalScores(self._scorer, self._batch_tokens, self._deadline_s, self._memory_mb)
        url, variable, most = self._server
        return ServerScores(url, os.environ.get(variable) or None, self._deadline_s, most)

    async def verdicts(
        self, client: LocalScores | ServerScores, prompt: Prompt, replies: Sequence[Any]
    ) -> list[Verdict]:
        return [await self._verdict(client, prompt, reply) for reply in replies]

    async def _verdict(self, client: LocalScores | ServerScores, prompt: Prompt, reply: Any) -> Verdict:
        if isinstance(reply, str):
            end = None if self._chat is None else self._chat.end
            options = self._template_options
            given = encode_prompt(self._tokenizer, prompt, template_options=options)
            made = encode_reply(self._tokenizer, prompt, self._quoted(reply), end, options)
            (score,) = await self._scores(client, prompt, [*given, *made])
            return self._made(score)
        if not isinstance(reply, list | tuple) or not reply or not all(isinstance(one, dict) for one in reply):
            raise TypeError(
                f"a reward model reads a text, or a list of messages or calls, not a {type(reply).__name__}"
            )
        if not all("reply" in one and "messages" in one for one in reply):
            begins = [] if reply[0].get("role") != "assistant" else prompt.conversation()
            (score,) = await self._scores(client, prompt, self._rendered([*begins, *reply], None))
            return self._made(score)
        calls = reply if self._turn_weight else reply[-1:]
        scores = [
            (await self._scores(client, prompt, self._rendered([*one["messages"], one["reply"]], one.get("tools"))))[0]
            for one in calls
        ]
        found = self._made(scores[-1])
        if not self._turn_weight:
            return found
        turns = (*(self._turn_weight * self._made(score).value for score in scores[:-1]), 0.0)
        return found._replace(parts={**found.parts, "turns": sum(turns)}, turns=turns)

    async def _scores(self, client: LocalScores | ServerScores, prompt: Prompt, tokens: Sequence[int]) -> list[float]:
        if self._max_tokens is not None and len(tokens) > self._max_tokens:
            raise JudgeError(
                f"cannot score {len(tokens)} tokens, {self._max_tokens} at most (RewardModel.max_tokens, or the model's"
                " positions); shorten the episodes or take a model with more"
            )
        return await client.scores(tokens, [len(tokens)])

    def _made(self, score: float) -> Verdict:
        if not math.isfinite(score):
            raise JudgeError(f"scored {score}; its weights or its dtype are broken")
        if not self._bounded:
            return Verdict(score, {})
        return Verdict(1.0 / (1.0 + math.exp(-score)) if score > -700 else 0.0, {"score": score})

    def _quoted(self, text: str) -> str:
        """`text` whose control tokens are text."""
        return harmless(text) if self._chat is None else self._chat.quoted(well_formed(text))

    def _rendered(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """A conversation's tokens, up to the one that ends its last message."""
        if self._chat is None:
            raise JudgeError("has no chat template for a transcript; put one into the tokenizer of RewardModel.path")
        shown = [
            {**one, "content": self._quoted(one["content"])} if isinstance(one.get("content"), str) else dict(one)
            for one in messages
        ]
        tokens = self._chat.encode(self._chat.text(shown, tools or None, goes_on=False))
        end = self._chat.end
        if end in tokens:
            last = len(tokens) - tokens[::-1].index(end)
            return tokens[:last]
        return tokens
