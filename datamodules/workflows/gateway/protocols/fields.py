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

from datamodules.workflows.gateway.errors import RequestError

_MOST_SHOWN = 100  # characters
_OF_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def a_list(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RequestError(f"{key}: must be a list, this is {type(value).__name__}", param=key)
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


def number(key: str, value: Any, kind: type, least: float, most: float = math.inf) -> Any:
    """An int or float, by `kind`, in `[least, most]`; None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise RequestError(f"{key}: must be a number, this is {type(value).__name__}", param=key)
    if not least <= value <= most or abs(value) > sys.float_info.max:
        raise RequestError(f"{key}: {shown(value)}, must be between {least:g} and {most:g}", param=key)
    return kind(value)


def one_of(key: str, value: Any, known: Iterable[str]) -> str:
    """A text that is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise RequestError(f"{key}: {shown(value)}, must be one of {', '.join(known)}", param=key)
    return value


def tools_offered(choice: Any) -> bool:
    """Whether OpenAI's `tool_choice` shows the tools. Raises RequestError where it would force a call."""
    if choice not in (None, "auto", "none"):
        raise RequestError(
            'tool_choice: only "auto" and "none" are supported: nothing forces the model to call',
            param="tool_choice",
            code="unsupported_parameter",
        )
    return bool(choice != "none")


def without_sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request of any protocol without what it says of how replies are sampled; a seed stays, it changes no odds."""
    return {key: value for key, value in body.items() if key not in _OF_SAMPLING}


def take_neutral(left: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Takes fields out of `left` that change what is sampled, unless they are None or have a value that does not.

    Raises RequestError with the code "unsupported_parameter".
    """
    for key, values in neutral.items():
        value = left.pop(key, None)
        if value is not None and not any((type(value) is not bool and value == one) or value is one for one in values):
            raise RequestError(
                f"{key}: {shown(value)} would change what is sampled, and what is trained must be sampled from the"
                " model as it is; leave it out, or have override_sampling pass it over",
                param=key,
                code="unsupported_parameter",
            )


def nothing_left(left: Mapping[str, Any], where: str = "") -> None:
    """Refuses what nobody took, unless it is None."""
    for key, value in left.items():
        if value is not None:
            name = f"{where}.{key[:_MOST_SHOWN]}" if where else key[:_MOST_SHOWN]
            raise RequestError(f"{name}: not supported; leave it out", param=name, code="unsupported_parameter")


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
