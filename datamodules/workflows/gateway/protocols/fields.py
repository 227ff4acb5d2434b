"""Checks of the values in a request's JSON.

Promises: whatever a client sends is either what the caller wants or a RequestError that names the field; what a request
holds is never shown in full.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, SchemaError

from datamodules.inference.protocol import SHAPINGS, Shaping
from datamodules.workflows.gateway.errors import RequestError

TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {"allowed_callers": (["direct"],)}
"""Fields of tools, and their values that change nothing: the model itself is the caller."""
_MOST_SHOWN = 100  # characters
_OF_SAMPLING = ("temperature", *SHAPINGS)
_OF_MANNER = ("reasoning", "reasoning_effort", "thinking", "verbosity")  # how a provider's model is to think and write
_OF_MANNER_WITHIN = {"text": "verbosity", "output_config": "effort"}
_OF_THINKING = [f"generationConfig.thinkingConfig.{name}" for name in ("thinkingBudget", "thinkingLevel")]
_WITHIN = {
    **{key: (name,) for key, name in _OF_MANNER_WITHIN.items()},
    "generationConfig": ("temperature", "topP", "topK", "presencePenalty", "frequencyPenalty", "thinkingConfig"),
}
_TEMPLATE = "set AgentWorkflow.template_options, which are the chat template's for all calls of a run"
_REMEDIES = {
    "chat_template_kwargs": f"leave it out, and {_TEMPLATE}",
    **dict.fromkeys(
        (*_OF_MANNER, *_OF_THINKING, *(f"{key}.{name}" for key, name in _OF_MANNER_WITHIN.items())),
        f"leave it out, or have override_sampling pass it over; for what the chat template knows of it {_TEMPLATE}",
    ),
}
_RANGES: dict[str, tuple[float, float]] = {
    "top_p": (math.ulp(0.0), 1),  # 0 would keep nothing
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (math.ulp(0.0), 2),
}
_LARGEST_BIAS = 100
_MOST_BIASES = 1024
_LONGEST_ID = 10  # digits
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def a_list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{key}: must be a list, this is {type(value).__name__}", param=key)
    return value


def parts(key: str, value: Any) -> list[Any]:
    """Of a message's content that is no text."""
    if not isinstance(value, list):
        kind = "null" if value is None else type(value).__name__
        raise RequestError(f"{key}: must be a text or a list of parts, this is {kind}", param=key)
    return value


def an_object(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{key}: must be an object, this is {type(value).__name__}", param=key)
    return value


def a_text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{key}: must be a text, this is {type(value).__name__}", param=key)
    return value


def optional_text(key: str, value: Any) -> str:
    """ "" for None."""
    return "" if value is None else a_text(key, value)


def texts(key: str, values: Any) -> tuple[str, ...]:
    """None is none."""
    return tuple(a_text(f"{key}[{k}]", one) for k, one in enumerate(a_list(key, [] if values is None else values)))


def flag(key: str, value: Any) -> bool:
    """None is false."""
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"{key}: must be true or false", param=key)


def a_schema(key: str, value: Any) -> str:
    """A JSON schema, as JSON."""
    schema = json.dumps(an_object(key, value), ensure_ascii=False)
    problem = _schema_problem(schema)
    if problem:
        raise RequestError(f"{key}: no valid JSON schema: {problem}", param=key)
    return schema


def number(key: str, value: Any, kind: type, least: float, most: float = math.inf) -> Any:
    """An int or float, by `kind`, in `[least, most]`; None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise RequestError(f"{key}: must be a number, this is {type(value).__name__}", param=key)
    if not least <= value <= most or abs(value) > sys.float_info.max:
        wanted = f"at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
        raise RequestError(f"{key}: {shown(value)}, must be {wanted}", param=key)
    return kind(value)


def one_of(key: str, value: Any, known: Iterable[str]) -> str:
    """A text that is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise RequestError(f"{key}: {shown(value)}, must be one of {', '.join(known)}", param=key)
    return value


def without_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request of any protocol without what it says of how replies are sampled, and of how the model is to think and
    to write; a seed stays, it changes no odds."""
    left = {key: value for key, value in body.items() if key not in (*_OF_SAMPLING, *_OF_MANNER)}
    for key, names in _WITHIN.items():
        if isinstance(left.get(key), dict):
            left[key] = {one: value for one, value in left[key].items() if one not in names}
    return left


def said(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something: clients also send those that are None, or objects of nothing but None."""
    empty: tuple[Any, ...] = (None, {})
    within = {key: said(value) if isinstance(value, dict) else value for key, value in body.items()}
    return {key: value for key, value in within.items() if value not in empty}


def take_neutral(left: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Takes fields out of `left` that cannot be honoured, unless they are None or have a value that changes nothing.

    Raises RequestError with the code "unsupported_parameter".

    Args:
        left: of a request.
        neutral: by a field, the values that change nothing.
        where: the object in the request, "" for the request itself.
    """
    for key, values in neutral.items():
        value = left.pop(key, None)
        if value is not None and not any((type(value) is not bool and value == one) or value is one for one in values):
            name = f"{where}.{key}" if where else key
            raise RequestError(
                f"{name}: {shown(value)} cannot be honoured; {_REMEDIES.get(name, 'leave it out')}",
                param=name,
                code="unsupported_parameter",
            )


def take_shaping(left: dict[str, Any], known: Iterable[str]) -> Shaping | None:
    """Takes the fields `known` of a `Shaping` out of `left`; None where they change nothing. Raises RequestError."""
    found: dict[str, Any] = {}
    for key in known:
        value = left.pop(key, None)
        if key == "logit_bias":
            found[key] = _biases({} if value is None else an_object(key, value))
        elif value is not None:
            found[key] = number(key, value, int if key == "top_k" else float, *_RANGES[key])
    if found.get("top_k") == 0:
        found["top_k"] = -1  # either is all of them
    shaping = Shaping(**found)
    return shaping if shaping.names else None


def _biases(found: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    if len(found) > _MOST_BIASES:
        raise RequestError(f"logit_bias: {len(found)} tokens, at most {_MOST_BIASES} are possible", param="logit_bias")
    biases = []
    for token, bias in found.items():
        if not (token.isascii() and token.isdigit() and len(token) < _LONGEST_ID) or bias is None:
            raise RequestError("logit_bias: must have token ids as keys, and numbers as values", param="logit_bias")
        biases.append((int(token), number("logit_bias", bias, float, -_LARGEST_BIAS, _LARGEST_BIAS)))
    return tuple(sorted(biases))


def nothing_left(left: Mapping[str, Any], where: str = "") -> None:
    """Refuses what nobody took, unless it is None."""
    for key, value in left.items():
        if value is not None:
            name = f"{where}.{key[:_MOST_SHOWN]}" if where else key[:_MOST_SHOWN]
            remedy = _REMEDIES.get(name, "leave it out")
            raise RequestError(f"{name}: not supported; {remedy}", param=name, code="unsupported_parameter")


def only(where: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses fields of an object that are not `known`, unless they are None or false, which ask for nothing."""
    nothing_left({key: one for key, one in value.items() if key not in known and one is not False}, where)


def function_tool(where: str, function: Mapping[str, Any], parameters: Any, schema_key: str) -> dict[str, Any]:
    """A tool as chat templates know it, of `name`, `description` and a JSON schema. Raises RequestError.

    Args:
        where: of the tool in the request.
        function: that has name and description.
        parameters: None for no arguments.
        schema_key: where these were found.
    """
    name = a_text(f"{where}.name", function.get("name"))
    if not _TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name: {shown(name)}, must be 1 to 128 of a-z, A-Z, 0-9, '_', '-' and '.'", param=f"{where}.name"
        )
    shape: dict[str, Any] = {"name": name}
    if function.get("description") is not None:
        shape["description"] = a_text(f"{where}.description", function["description"])
    if parameters is not None:
        problem = _schema_problem(json.dumps(an_object(schema_key, parameters)))
        if problem:
            raise RequestError(
                f"{schema_key}: invalid schema for function '{name}': {problem}",
                param=schema_key,
                code="invalid_function_parameters",
            )
        shape["parameters"] = parameters
    return {"type": "function", "function": shape}


def check_made(results: Mapping[str, str], before: Iterable[Mapping[str, Any]] = ()) -> None:
    """Raises RequestError for results of calls that no message `before` made.

    Args:
        results: where they are in the request, by the ids of their calls.
        before: the messages in front of it.
    """
    made = {call.get("id") for one in before for call in one.get("tool_calls", ())} if results else set()
    for identity, where in results.items():
        if identity not in made:
            raise RequestError(
                f"{where}: {shown(identity)}, nothing before it made a call of this id; send the call first",
                param=where,
            )


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    try:
        return json.dumps(value)[:_MOST_SHOWN]
    except (ValueError, RecursionError):  # numbers of thousands of digits
        return f"this {type(value).__name__}"


@lru_cache(maxsize=1024)  # an agent sends the same tools with every call
def _schema_problem(schema: str) -> str:
    try:
        Draft202012Validator.check_schema(json.loads(schema))
    except SchemaError as error:
        return str(error.message)[:_MOST_SHOWN]
    return ""
