"""Structured output: a reply in a JSON schema, a call of a tool, one call at most. Providers force their models into
it; here nothing does.

Promises: each is refused by its field, or, by `Sampling.override`, told the model at the end of the system's message,
and never left out in silence. What the model is trained on has been sampled from it freely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import fields
from datamodules.workflows.gateway.protocols.base import Asked, Demand

Tools = Sequence[Mapping[str, Any]] | None

_PROMPT = "have override_sampling tell the model so"
_TOOL = (
    "offer the shape of an answer as a tool, and have the agent take a reply without a call, too (LangChain:"
    " bind_tools([Shape]) in place of with_structured_output)"
)
_ALONE = "without any text or code fence around it"


def reply_format(param: str, value: Any, tools: Tools) -> tuple[Demand, ...]:
    """The shape of a reply: `response_format` and what other protocols call it. Raises RequestError.

    Args:
        param: the field.
        value: of it; None and text for none.
        tools: that are offered: a reply that calls one has no shape.
    """
    if value is None:
        return ()
    given = fields.an_object(param, value)
    kind = fields.one_of(f"{param}.type", given.get("type"), ("text", "json_object", "json_schema"))
    if kind == "text":
        return ()
    begin = "A reply that calls no tool must be" if tools else "Your reply must be"
    words = f"{begin} a JSON object, {_ALONE}."
    at, form = param, given
    if kind == "json_schema" and isinstance(given.get("json_schema"), dict):  # as Chat Completions has it
        fields.only(param, given, ("type", "json_schema"))
        at, form = f"{param}.json_schema", given["json_schema"]
    named = next((one for one in ("schema", "response_schema") if form.get(one) is not None), "schema")
    fields.only(at, form, ("type", named, *(("name", "description", "strict") if kind == "json_schema" else ())))
    if kind == "json_schema" or form.get(named) is not None:
        schema = fields.a_schema(f"{at}.{named}", form.get(named))
        told = fields.optional_text(f"{at}.description", form.get("description"))
        words = f"{begin} JSON that follows this schema, {_ALONE}{f' ({told})' if told else ''}:\n{schema}"
    return (
        Demand(
            param,
            f"{fields.shown(value)} cannot be honoured; nothing forces a reply into a shape (frameworks send it for an"
            f" output type of the agent's): {_PROMPT}, or say it in the prompt and read the reply, or {_TOOL}",
            words,
        ),
    )


def openai_calls(left: dict[str, Any], tools: Tools) -> tuple[Demand, ...]:
    """Takes `tool_choice` and `parallel_tool_calls` out of a request to one of OpenAI's protocols. Raises
    RequestError."""
    choice, several = left.pop("tool_choice", None), left.pop("parallel_tool_calls", None)
    found = []
    if choice not in (None, "auto", "none"):
        name = None
        if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            function = choice.get("function", choice)
            name = fields.a_text("tool_choice.name", fields.an_object("tool_choice.function", function).get("name"))
        elif choice != "required":
            raise RequestError(
                f'tool_choice: {fields.shown(choice)}, must be "auto", "none", "required" or a function',
                param="tool_choice",
                code="unsupported_parameter",
            )
        found.append(_call("tool_choice", choice, name, tools))
    if several is not None and not fields.flag("parallel_tool_calls", several) and tools and choice != "none":
        found.append(_one_call("parallel_tool_calls", several))
    return tuple(found)


def anthropic_calls(choice: dict[str, Any], tools: Tools) -> tuple[Demand, ...]:
    """The same of Anthropic's `tool_choice`. Raises RequestError."""
    kind = fields.one_of("tool_choice.type", choice.get("type"), ("auto", "none", "any", "tool"))
    alone = "disable_parallel_tool_use"
    fields.only("tool_choice", choice, ("type", alone, *(["name"] if kind == "tool" else [])))
    name = fields.a_text("tool_choice.name", choice.get("name")) if kind == "tool" else None
    found = [] if kind in ("auto", "none") else [_call("tool_choice", choice, name, tools)]
    if fields.flag(f"tool_choice.{alone}", choice.get(alone)) and tools and kind != "none":
        found.append(_one_call(f"tool_choice.{alone}", True))
    return tuple(found)


def google_calls(config: dict[str, Any], tools: Tools) -> tuple[Demand, ...]:
    """The same of the Gemini API's `functionCallingConfig`. Raises RequestError."""
    param = "toolConfig.functionCallingConfig"
    # Of "VALIDATED" only schemas are forced, of which `strict` of a tool is passed over in other protocols, too.
    kinds = ("MODE_UNSPECIFIED", "AUTO", "VALIDATED", "ANY", "NONE")
    kind = fields.one_of(f"{param}.mode", config.get("mode") or "AUTO", kinds)
    fields.only(param, config, ("mode", "allowedFunctionNames"))
    names = fields.texts(f"{param}.allowedFunctionNames", config.get("allowedFunctionNames"))
    if kind == "NONE" or (kind != "ANY" and not names):
        return ()
    if kind != "ANY" or len(names) > 1:
        raise RequestError(
            f"{param}.allowedFunctionNames: cannot be honoured; offer the tools that may be called, and no others",
            param=f"{param}.allowedFunctionNames",
            code="unsupported_parameter",
        )
    return (_call(param, config, names[0] if names else None, tools),)


def told(asked: Asked, override: bool) -> Asked:
    """The request with its demands told in the system's message, which is the first one. Raises RequestError.

    Args:
        asked: with all messages of its conversation.
        override: of `Sampling`; without it demands are refused.
    """
    if not asked.demands:
        return asked
    if not override:
        first = asked.demands[0]
        raise RequestError(f"{first.param}: {first.problem}", param=first.param, code="unsupported_parameter")
    words = _words(asked)
    system = next(iter(asked.messages), {})
    if system.get("role") != "system":
        head: Message = {"role": "system", "content": words}
        return replace(asked, messages=[head, *asked.messages], before=[head, *asked.before])
    head = {**system, "content": f"{system['content']}\n\n{words}"}
    return replace(asked, messages=[head, *asked.messages[1:]])


def added(asked: Asked) -> str:
    """What `told` has added to a message that requests which go on with this one see, too; "" for nothing."""
    return f"\n\n{_words(asked)}" if asked.demands and not asked.before else ""


def untold(messages: Sequence[Message], added: str) -> list[Message]:
    """Those of an earlier request, without what was added to the first of them for that request alone."""
    if not added:
        return list(messages)
    return [{**messages[0], "content": str(messages[0]["content"]).removesuffix(added)}, *messages[1:]]


def check_shown(asked: Asked, text: str) -> None:
    """Raises RequestError where a prompt's text does not tell the model what it was to be told."""
    for one in asked.demands:
        if one.words not in text:
            raise RequestError(
                f"{one.param}: the chat template of the model's tokenizer does not show this conversation's message of"
                " the system to the model; use a model whose template does, or leave it out, and say it in a message of"
                " the user",
                param=one.param,
            )


def _words(asked: Asked) -> str:
    return "\n\n".join(one.words for one in asked.demands)


def _call(param: str, value: Any, name: Any, tools: Tools) -> Demand:
    """A call is wanted; of any tool where the name is None."""
    known = [str(one["function"]["name"]) for one in tools or ()]
    if not known:
        raise RequestError(f"{param}: {fields.shown(value)}, and no tools are offered; add tools", param=param)
    which = "one of the tools"
    if name is not None:
        which = f"the tool {fields.one_of(f'{param}.name', name, known)}"
    return Demand(
        param,
        f'only "auto" and "none" are supported: nothing forces the model to call; {_PROMPT}, or {_TOOL}',
        f"Your reply must be a call of {which}.",
    )


def _one_call(param: str, value: Any) -> Demand:
    return Demand(
        param,
        f"{fields.shown(value)} cannot be honoured; nothing keeps the model from several calls in a reply: leave it"
        f" out, or {_PROMPT}, or {_TOOL}",
        "A reply may hold one call of a tool at most.",
    )
