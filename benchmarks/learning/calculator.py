"""The task of `benchmarks.learning.door`: sums of three numbers, by a model that can ask a calculator.

The agent is examples/agents/plain_openai/agent.py, as it stands. Here is what a run needs around it: questions, a
tokenizer, demonstrations to begin with, the agent's tool for the same conversation as a `ToolWorkflow`, and a clock.

Promises: questions of the held-out split are never trained on; agent and workflow send the engine the same ids, as
long as the model writes what can be read as a call or as an answer (tests/benchmarks/learning/test_door.py).
"""

from __future__ import annotations

import json
import random
import string
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from datamodules.conversations.chat import ChatEncoder, Transcript, load_chat_tokenizer
from datamodules.conversations.tokens import Conversation
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.workflows import Toolbox
from datamodules.workflows.tool_calls import ToolCall, hermes_calls
from examples.agents.plain_openai.agent import TOOLS, calculated

ASKED = "What is the sum of "
CALL, CALLED = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
# Hermes' form: tools as JSON for the system, calls between <tool_call> and </tool_call>.
TEMPLATE = """
{%- if tools -%}<|system|>{{ tools | tojson }}<|end|>{%- endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
""".strip()


class SumQuestions(PromptSource):
    """Questions like "What is the sum of 12, 34 and 70?", whose answer is "116".

    Args:
        split: "train" or "validation", which are disjoint, in whatever order the numbers stand.
        size: questions after which the source starts over; None for no end.
        seed: of the draws.
    """

    def __init__(self, split: Literal["train", "validation"] = "train", size: int | None = None, seed: int = 0) -> None:
        self.split, self._size, self.seed = split, size, seed

    @property
    def size(self) -> int | None:
        return self._size

    def deal(self, index: int) -> Prompt:
        rng = random.Random(f"{self.seed}/{index % self._size if self._size else index}")
        while True:
            numbers = [rng.randrange(10, 100) for _ in range(3)]
            if (zlib.crc32(str(sorted(numbers)).encode()) % 10 == 0) == (self.split == "validation"):
                break
        text = "{}, {} and {}?".format(*numbers)
        return Prompt(id="+".join(map(str, numbers)), text=ASKED + text, answer=str(sum(numbers)))


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """A token a character of ASCII; and one each for what is the same in every conversation.

    So that a conversation has some 40 tokens, and a model of 0.6M parameters learns it in a minute.
    """
    same = [CALL, CALLED, json.dumps(TOOLS), ASKED, ", ", " and ", *(f"<|{role}|>" for role in ROLES)]
    characters = [chr(k) for k in range(32, 127)] + ["\n"]
    assert set(string.printable[:95]) <= set(characters)  # of errors too, which Python words
    core = Tokenizer(models.WordLevel({token: k for k, token in enumerate([END, *characters])}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    # Not special ones: a reply with a stray one in it is no right answer, whoever reads it.
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text in same])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def demonstrations(count: int, seed: int, careless: float) -> Iterator[dict[str, Any]]:
    """Conversations to imitate, as lines for `RecordedDataModule`: a call, and its result as the answer. The share
    `careless` of them leaves the last number out of the call."""
    questions = SumQuestions(seed=seed)
    for k in range(count):
        one = questions.deal(k)
        is_careless = random.Random(f"{seed}/{k}/careless").random() < careless
        expression = one.id.rpartition("+")[0] if is_careless else one.id
        arguments = {"expression": expression}
        result = calculated(json.dumps(arguments))
        messages = [
            {"role": "user", "content": one.text},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "name": "calculate", "arguments": arguments}],
            },
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        yield {"task_id": k, "reward": float(result == one.answer), "messages": messages, "tools": TOOLS}


class Calculator(Toolbox):
    """The agent's tool for `ToolWorkflow`."""

    tools = TOOLS

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        return calculated(json.dumps(arguments))


def readable_calls(text: str) -> list[ToolCall]:
    """The calls of a reply, none where one of them cannot be read: then clients of a provider see text, too."""
    found = hermes_calls(text)
    return [] if any(one.error for one in found) else found


class StopAt(Callback):
    """Ends imitation once the model gives right conversations often enough, whenever that is on this machine.

    Args:
        success: the probability of a right conversation at which to stop, a mean over 256 of the training split.
        every: optimizer steps between two looks.
        tokenizer: directory of the model's.
    """

    def __init__(self, success: float, every: int, tokenizer: str) -> None:
        self.success, self.every = success, every
        encoder = ChatEncoder(load_chat_tokenizer(tokenizer))
        self._right = [
            encoder.encode(Transcript(str(k), 0, "", 1.0, one["messages"], "a demonstration", one["tools"]))
            for k, one in enumerate(demonstrations(256, seed=2, careless=0.0))
        ]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every:
            return
        policy: Any = pl_module.policy
        model = AutoModelForCausalLM.from_config(policy.config, attn_implementation="sdpa")  # not the tree's
        model.load_state_dict(policy.state_dict())
        found = probability(model.eval(), self._right)
        print(f"after {trainer.global_step} steps: {found:.3f}", flush=True)
        if found >= self.success:
            trainer.should_stop = True


@torch.no_grad()
def probability(model: Any, conversations: Sequence[Conversation]) -> float:
    """With which the model samples all replies of such a conversation, given what it is told; the mean."""
    size = max(len(one.tokens) for one in conversations)
    tokens = torch.zeros(len(conversations), size, dtype=torch.long)
    said = torch.zeros(len(conversations), size, dtype=torch.bool)
    for k, one in enumerate(conversations):
        tokens[k, : len(one.tokens)] = torch.from_numpy(one.tokens)
        for start, end in zip(one.starts, one.ends):
            said[k, start:end] = True
    logprobs = model(tokens[:, :-1]).logits.float().log_softmax(-1)  # padding is behind, where nothing looks at it
    taken = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((taken * said[:, 1:]).sum(1).exp().mean())


class StepClock(Callback):
    """Logs `clock/wall` and `clock/cpu`: seconds of each optimizer step, since the one before and without validation;
    CPU is that of the run with all processes that it started, agents and rewards. And `clock/sequences`, which it
    trained."""

    def __init__(self) -> None:
        self._root = psutil.Process()
        self._began = self._left_out = (0.0, 0.0)
        self._paused = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._left_out = self._now(), (0.0, 0.0)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = self._now()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._left_out = _plus(self._left_out, _minus(self._now(), self._paused))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self._now()
        wall, cpu = _minus(_minus(now, self._began), self._left_out)
        self._began, self._left_out = now, (0.0, 0.0)
        values = {"clock/wall": wall, "clock/cpu": cpu, "clock/sequences": float(len(batch.batch))}
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _now(self) -> tuple[float, float]:
        """Wall and CPU seconds: of processes that run, and of those that they have taken leave of, agents' above all,
        which begin and end between two looks."""
        spent = 0.0
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended, and is its parent's now
                spent += sum(process.cpu_times()[:4])
        return time.perf_counter(), spent


def _plus(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] + other[0], one[1] + other[1]


def _minus(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] - other[0], one[1] - other[1]
