"""Tools of an agent: what they are, and how the calls of one reply are carried out.

Promises: whatever a model asks for gets an answer it can read: a result, or what was wrong with the call. Unknown
tools, arguments that break the schema, tools that raise or take too long are counted and told, and never end the
episode, unless a tool says by `ToolsLost` that it has to. The calls of one reply run concurrently, and are answered in
their order.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from transformers.utils import get_json_schema

from app import checks
from datamodules.processes import foreign
from datamodules.processes.calls import CallFailed, DeadlinePassed
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.calling import Caller, within
from datamodules.workflows.tool_calls import ToolCall

_CANCEL_S = 10.0


class Toolbox(ABC):
    """The tools of an episode. Any class with an async method `call` and an attribute `tools` will do.

    Where it has them, these are used too:
        prepare(): before the first episode; `tools` may be empty until then.
        log_to(directory): before `prepare`, a folder of the run directory for what is worth keeping.
        async call_within(seconds, name, arguments): in place of `call`, to keep the deadline itself (raise
            `datamodules.processes.calls.DeadlinePassed`), and so to tell it from an episode that is given up.
        open(prompt) -> Toolbox: fresh tools for one episode (a database of its own, say).
        async close(): of what `open` gave, when the episode ends, however it does.
        async reward(prompt, reply) -> float: of the episode, in place of the configured reward.
        stop(): of what is shared by all episodes, when rollouts end.

    The methods run in the rollouts' event loop: one that computes for long, or waits without `await`, holds up all
    episodes, whatever its deadline. `FunctionTools` runs plain functions elsewhere.

    Attributes:
        tools: JSON schemas in OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`.
    """

    tools: list[dict[str, Any]]

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """The result of one call, a text or anything JSON-able. What it raises, but ToolsLost, is told to the model."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return cls is Toolbox and inspect.iscoroutinefunction(getattr(other, "call", None))


class ToolsLost(RuntimeError):
    """A call after which the episode cannot go on, for what its tools knew is gone. It costs the episode's group."""


class FunctionTools(Toolbox):
    """Functions as tools; their schemas are made from annotations and Google-style docstrings.

    Asynchronous functions are awaited in the rollouts' event loop: the right choice for tools that wait (network,
    databases). Others run in worker processes, each with state of its own, so that one that computes, hangs or crashes
    holds up nobody and is killed at its deadline with what it started; what they print is dropped.

    Args:
        functions: import paths.
        isolated: False runs functions that are not asynchronous on threads of the training process instead, where they
            share its state; there one that keeps the interpreter's lock (a regular expression, say) stops everything,
            whatever its deadline.
        workers: most processes, or threads, at once. Further calls wait; for a process, that does not count for their
            deadlines.
        memory_mb: most memory of a process with all it started, in 10^6 bytes; None for its share of a quarter of the
            machine's, at least 1000.
        keep_environment: environment variables that the processes may see though their names look like secrets; see
            `datamodules.rewards.RewardOptions`.

    Raises:
        ValueError: a function whose schema cannot be made (an argument without annotation or description), two of one
            name, one that cannot be isolated (a local function, a method), an option out of range or without effect.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        isolated: bool = True,
        workers: int = 8,
        memory_mb: float | None = None,
        keep_environment: Sequence[str] | None = None,
    ) -> None:
        self.tools = []
        named: dict[str, Callable[..., Any]] = {}
        for function in functions:
            name = getattr(function, "__name__", repr(function))
            try:
                self.tools.append(get_json_schema(function))
            except Exception as error:  # of a class of the library's own for each fault
                raise ValueError(f"FunctionTools.functions: {name} cannot be described to a model: {error}") from error
            if name in named:
                raise ValueError(f"FunctionTools.functions: there is a tool '{name}' already; name each once")
            named[name] = function
        self._caller = Caller(
            named,
            isolated=isolated,
            workers=workers,
            memory_mb=memory_mb,
            keep_environment=keep_environment,
            owner="FunctionTools",
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self.call_within(None, name, arguments)

    async def call_within(self, seconds: float | None, name: str, arguments: dict[str, Any]) -> Any:
        """As `call`, with a deadline for the time that the function runs. Raises DeadlinePassed."""
        return await self._caller.call(name, (), arguments, seconds)

    async def close(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the worker processes; the next call starts others."""
        self._caller.stop()


class ToolRunner:
    """Carries out calls.

    Args:
        tools: JSON schemas, as `Toolbox.tools`.
        deadline_s: seconds a call may take.
        deadlines: tool name -> seconds, for those that have their own.
        max_calls: calls of one reply that are carried out; those beyond are refused.
        max_result_chars: longest result; longer ones are cut, and say so. None for no limit.

    Raises:
        ValueError: schemas that are none, two tools of one name, an argument out of range.
    """

    def __init__(
        self,
        tools: list[dict[str, Any]],
        deadline_s: float = 30.0,
        deadlines: Mapping[str, float] | None = None,
        max_calls: int = 16,
        max_result_chars: int | None = None,
    ) -> None:
        self._validators = _validators(tools)
        stray = [name for name in deadlines or {} if name not in self._validators]
        if stray:
            raise ValueError(f"tool_deadlines_s: '{stray[0]}' is none of the tools {list(self._validators)}")
        self._deadlines = {name: (deadlines or {}).get(name, deadline_s) for name in self._validators}
        checks.deadline({f"tool_deadline_s of '{name}'": seconds for name, seconds in self._deadlines.items()})
        checks.at_least(1, {"max_calls": max_calls, "max_result_chars": max_result_chars})
        self._max_calls = max_calls
        self._max_result_chars = max_result_chars

    async def answer(
        self, box: Toolbox, calls: Sequence[ToolCall], engine: EpisodeEngine, counts: Counter[str]
    ) -> list[str]:
        """What the model is told about each of the calls of one reply. Adds to `counts` what became of them."""
        counts["tool_calls"] += len(calls)
        tasks = [asyncio.create_task(self._one(box, one, k, engine, counts)) for k, one in enumerate(calls)]
        try:
            told = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # where one has ended the episode, its tools are closed next
                task.cancel()
            if not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=_CANCEL_S)
        # Half a surrogate pair, which JSON can write, has no tokens.
        return [text.encode("utf-8", "replace").decode("utf-8") for text in told]

    async def _one(self, box: Toolbox, one: ToolCall, k: int, engine: EpisodeEngine, counts: Counter[str]) -> str:
        def refuse(count: str, why: str) -> str:
            counts[count] += 1
            return f"Error: {why}"

        if k >= self._max_calls:
            return refuse("refused_calls", f"only {self._max_calls} calls of one reply are carried out")
        if one.error:
            return refuse("malformed_calls", f"the call of {one.name or 'a tool'} cannot be read: {one.error}")
        validator = self._validators.get(one.name)
        if validator is None:
            known = ", ".join(self._validators)
            return refuse("unknown_tools", f"there is no tool '{one.name[:100]}'; there are: {known}")
        fault = _fault(validator, one.arguments)
        if fault:
            return refuse("invalid_arguments", f"arguments of {one.name}{fault}")
        seconds = self._deadlines[one.name]
        try:
            with engine.waiting("tool", one.name):
                if (call_within := getattr(box, "call_within", None)) is not None:
                    result = await call_within(seconds, one.name, one.arguments)
                else:
                    result = await within(seconds, box.call(one.name, one.arguments))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        except BaseException as error:  # SystemExit would end the event loop
            if foreign.must_pass(error) or isinstance(error, ToolsLost):
                raise
            if isinstance(error, DeadlinePassed):
                return refuse("timed_out_calls", f"{one.name} did not answer within {seconds:g} s")
            said = str(error) if isinstance(error, CallFailed) else foreign.described(error)
            return refuse("failed_calls", f"{one.name} failed: {said}")
        over = 0 if self._max_result_chars is None else len(text) - self._max_result_chars
        if over <= 0:
            return text
        counts["cut_results"] += 1
        return f"{text[: self._max_result_chars]}... ({over} more characters are left out)"


def _fault(validator: Draft202012Validator, arguments: dict[str, Any]) -> str:
    """Where the arguments break the schema, and how; "" where they do not."""
    try:
        fault = best_match(validator.iter_errors(arguments))
    except Exception as error:  # integers beyond floats, endless nesting, references to nothing
        return f": cannot be checked: {type(error).__name__}: {str(error)[:300]}"
    if fault is None:
        return ""
    where = "".join(f" at {part}" for part in fault.absolute_path)
    return f"{where}: {fault.message[:300]}"


def _validators(tools: list[dict[str, Any]]) -> dict[str, Draft202012Validator]:
    found: dict[str, Draft202012Validator] = {}
    if not isinstance(tools, list) or not tools:
        raise ValueError("tools: must be a list of at least one JSON schema")
    for k, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise ValueError(
                f"tools[{k}]: must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}"
            )
        if name in found:
            raise ValueError(f"tools[{k}]: there is a tool '{name}' already; name each once")
        parameters = function.get("parameters", {"type": "object"})
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise ValueError(f"tools[{k}].function.parameters of '{name}': no JSON schema: {error.message}") from error
        found[name] = Draft202012Validator(parameters)
    return found
