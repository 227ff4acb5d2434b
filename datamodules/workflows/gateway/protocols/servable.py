"""What of a request a model and its engine can honour, beyond what its protocol has.

Promises: what would be sampled otherwise than it is trained, and what the model would never see, is refused by its
field, with the remedy; nothing is left out of a prompt in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.batch import TEMPERATURES
from datamodules.conversations.chat_template import HIDES_TOOLS, Chat, Message
from datamodules.inference.protocol import Shaping
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import Asked

_OR_SERVE = ", or set untrainable: serve, which answers such calls and does not train on them"
_OR_HIDE = "set AgentWorkflow.show_tools: false (arborist gateway: --hide_tools)"


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled.

    Attributes:
        max_new_tokens: most of a reply, whatever the call says.
        temperature: of calls that name none.
        override: of all calls: what they say of temperature, top_p, penalties and their like, and of how the model is
            to think and to write, is passed over, and what it would be forced into is told it.
        untrainable: calls that ask for what cannot be trained on, "refuse" or "serve" them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    override: bool = False
    untrainable: Literal["refuse", "serve"] = "refuse"


def check_sampling(asked: Asked, temperature: float, engine: EpisodeEngine, untrainable: str) -> None:
    """Raises RequestError for a call that cannot be sampled as it asks, or not be trained on then.

    Args:
        asked: by the client.
        temperature: at which it would be sampled.
        engine: of the episode.
        untrainable: of `Sampling`.
    """
    coldest, hottest = TEMPERATURES
    if not coldest <= temperature <= hottest and not (temperature == 0 and untrainable == "serve"):
        raise RequestError(
            f"temperature: {temperature}, must be between {coldest:g} and {hottest:g} to be trained on; leave it"
            f" out, or have override_sampling pass it over{'' if temperature else _OR_SERVE}",
            param="temperature",
        )
    _check_shaping(asked.shaping, engine, untrainable)
    if "" in asked.stop:
        raise RequestError("stop: an empty text ends every reply; leave it out", param="stop")


def check_tools(
    chat: Chat, messages: Sequence[Message], tools: list[dict[str, Any]] | None, show_tools: bool = True
) -> None:
    """Raises RequestError where the template leaves out the tools, or calls and results of the history.

    Args:
        chat: the template.
        messages, tools: of the request.
        show_tools: whether the template is to show the tools and calls.
    """
    if not chat.visible.results(show_tools and bool(tools)) and any(one.get("role") == "tool" for one in messages):
        raise RequestError(
            "messages: they hold results of tools, and the chat template of the model's tokenizer does not show"
            " messages of the role tool to the model; use a model whose template does, or send results as messages of"
            " the user",
            param="messages",
        )
    if not show_tools:
        return
    begins = next(iter(messages), {}).get("role") == "system"
    if tools and not chat.visible.tools(begins):
        raise RequestError(
            f"tools: the chat template of the model's tokenizer {HIDES_TOOLS}; use a model whose template"
            f" does, or describe them in the agent's own prompt and {_OR_HIDE}",
            param="tools",
        )
    if not chat.visible.calls(bool(tools)) and any(one.get("tool_calls") for one in messages):
        raise RequestError(
            "messages: they hold tool_calls, and the chat template of the model's tokenizer does not show earlier calls"
            f" to the model; use a model whose template does, or {_OR_HIDE}, which shows the replies that made them as"
            " they were sampled",
            param="messages",
        )


def hides_speakers(chat: Chat, messages: Sequence[Message]) -> bool:
    """Whether messages of the user's are from several (`name`), and neither their texts nor the template show whose is
    which."""
    named = [one for one in messages if one["role"] == "user" and "name" in one]
    unsaid = any(one["name"] not in str(one["content"]) for one in named)
    return unsaid and len({one["name"] for one in named}) > 1 and not chat.visible.names()


def check_systems(chat: Chat, messages: Sequence[Message], tools: bool) -> None:
    """Raises RequestError where the template leaves out messages of the system: all, all but the first or the last, or
    those behind the user's. `tools`: whether it shows some."""
    front = next((k for k, one in enumerate(messages) if one["role"] != "system"), len(messages))
    told = [k for k, one in enumerate(messages) if one["role"] == "system" and str(one["content"]).strip()]
    begin, behind = max((k + 1 for k in told if k < front), default=0), sum(k > front for k in told)
    asked, visible = front < len(messages), chat.visible.systems
    which = ""
    if told and not visible(min(begin, 2), min(behind, 2), asked, tools):
        which = "several messages of the system"
        if begin and not visible(1, 0, asked, tools):
            which = "messages of the system" + ("" if asked else " alone")
        elif behind and not visible(0, 1, asked, tools):
            which = "messages of the system behind the user's"
    if which:
        raise RequestError(
            f"messages: the chat template of the model's tokenizer does not show {which} to the model; use a model"
            " whose template does, or have the agent say it in a message of the user",
            param="messages",
        )


def _check_shaping(shaping: Shaping | None, engine: EpisodeEngine, untrainable: str) -> None:
    for name in () if shaping is None else shaping.names:
        problem = ""
        if untrainable == "refuse":
            problem = (
                "it would change what is sampled, and what is trained must be sampled from the model as it is;"
                f" leave it out, or have override_sampling pass it over{_OR_SERVE}"
            )
        elif name not in engine.shapings:
            problem = "this engine cannot do it; leave it out, or have override_sampling pass it over"
        elif name == "logit_bias" and shaping and shaping.logit_bias[-1][0] >= engine.vocab_size:
            problem = f"token ids must be from 0 to {engine.vocab_size - 1}"
        if problem:
            raise RequestError(f"{name}: {problem}", param=name, code="unsupported_parameter")
