"""An engine that says what a test has written for it, in a real tokenizer's tokens, and remembers what it was asked.

Also chat templates in the shape of those that models come with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from app.batch import Trajectory
from datamodules.inference.clock import PausedClock
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.pipeline.player import EpisodePlayer
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import encode_prompt
from datamodules.rewards.options import Judgement
from tests.datamodules.fake_engine import FakeEngine

# As Qwen's: results share a user message, earlier thoughts are dropped once a user has spoken again.
CHATML = """
{%- set state = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set state.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|begin|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}<|begin|>user{% endif %}
<tool>
{{ m.content }}
</tool>
{%- if loop.last or loop.nextitem.role != 'tool' -%}<|end|>
{% endif -%}
{%- elif m.role == 'assistant' and loop.index0 < state.asked -%}
<|begin|>assistant
{{ m.content.split('</think>')[-1] | trim }}<|end|>
{% else -%}
<|begin|>{{ m.role }}
{{ m.content }}<|end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|begin|>assistant
{% endif -%}
""".strip()

# As most: shows the calls of earlier replies, written by the template.
WITH_CALLS = CHATML.replace(
    "{{ m.content }}<|end|>\n{% endif -%}\n{%- endfor -%}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content }}<tool_call>{{ '\\n' }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ '\\n' }}</tool_call>{% endfor %}<|end|>\n{% endif -%}\n{%- endfor -%}",
)


class ScriptedEngine(FakeEngine):
    """Says `replies` one after the other, or what a function makes of the request.

    A reply is text (the end-of-sequence token follows) or token ids as they are. Longer ones than asked for are cut,
    as are those with a stop text. The k-th generated token of all has log-probability -k / 1000 and version k // 10.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        replies: Sequence[str | list[int]] | Callable[[GenerationRequest], str | list[int]],
        max_context: int = 4096,
    ) -> None:
        super().__init__(max_context=max_context)
        self.vocab_size = len(tokenizer)
        self.responses: list[GenerationResponse] = []
        self._tokenizer = tokenizer
        self._replies = replies
        self._made = 0
        self.pace_s = 0.0  # between two tokens of a reply that somebody reads along

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        self.seen.append(request)
        await asyncio.sleep(0)
        reply = self._replies(request) if callable(self._replies) else self._replies[len(self.responses)]
        if isinstance(reply, str):
            reply = [*self._tokenizer.encode(reply, add_special_tokens=False), self._tokenizer.eos_token_id]
        stops = request.stops()
        tokens = reply[: request.max_new_tokens]
        stopped = None if stops is None else stops.end(tokens)
        tokens = tokens[:stopped]
        places = range(self._made, self._made + len(tokens))
        self._made += len(tokens)
        response = GenerationResponse(
            tokens,
            [-k / 1000 for k in places],
            [k // 10 for k in places],
            "stop" if stopped or (tokens and tokens[-1] in request.stop_token_ids) else "length",
        )
        if request.on_tokens is not None:
            for token, logprob in zip(tokens, response.logprobs, strict=True):
                request.tell([token], [logprob])
                await asyncio.sleep(self.pace_s)
        self.responses.append(response)
        return response


class StandingStill(ScriptedEngine):
    """Says that it stands still, which no deadline counts, until somebody resumes its clock."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clock = PausedClock()
        self.clock.pause()

    @property
    def still_s(self) -> float:
        return self.clock.still_s


def stands_still_until(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such engines: what an agent needs until this file is there counts for no deadline."""
    came: list[float] = []

    def still_s(engine: ScriptedEngine) -> float:
        if not came and there.exists():
            came.append(time.monotonic())
        return came[0] if came else time.monotonic()

    monkeypatch.setattr(ScriptedEngine, "still_s", property(still_s), raising=False)


class Pool:
    """In place of reward workers: calls the function."""

    def __init__(self, reward: Callable[[Prompt, Any], float]) -> None:
        self.reward = reward
        self.asked: list[Any] = []

    async def judge(self, prompt: Prompt, completion: Any) -> Judgement:
        self.asked.append(completion)
        return Judgement(self.reward(prompt, completion))


def play(
    workflow: Any,
    engine: ScriptedEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    reward: Callable[[Prompt, Any], float] | Pool | None = None,
    sample: int = 0,
) -> list[Trajectory]:
    """One episode, as the producer plays it: prepared, encoded, with a deadline, checked."""
    workflow.prepare(tokenizer)
    encode = getattr(workflow, "encode", None) or partial(encode_prompt, tokenizer)
    given = Prompt(**{**vars(prompt), "tokens": tuple(encode(prompt))})
    pool: Any = Pool(reward) if callable(reward) else reward
    player = EpisodePlayer(workflow, engine, tokenizer, pool, deadline_s=60.0)
    try:
        return asyncio.run(player.play(given, name="e", seed="s", sample=sample))
    finally:
        if hasattr(workflow, "close"):
            workflow.close()


def generated(trajectory: Trajectory) -> list[int]:
    """The tokens with a loss."""
    return trajectory.tokens[trajectory.loss_mask].tolist()
