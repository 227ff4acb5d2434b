"""How an agent is run: a function, a command, or a service that is asked.

Promises: whatever it is, it finds its session where the clients of OpenAI and Anthropic look for a provider; functions
and commands run in processes that end, with all they started, at their deadline; one that fails is a `CallFailed` or
`DeadlinePassed` that says why. Keys are in environments and in the bodies of requests, and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import math
import os
import pkgutil
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.clients import KEYS, no_keys_needed
from datamodules.processes.calls import CallFailed, Calls, ProcessCalls
from datamodules.processes.commands import run_command
from datamodules.processes.deadline import Held
from datamodules.processes.environment import InEnvironment
from datamodules.processes.foreign import described, place
from datamodules.processes.forks import Forks, modules_of
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.ray_executor import RayExecutor
from datamodules.workflows.calling import within

_log = logging.getLogger(__name__)
_NO_TRACES = "OPENAI_AGENTS_DISABLE_TRACING"
_ADDRESSES = {
    "OPENAI_BASE_URL": "/v1",
    "ANTHROPIC_BASE_URL": "",  # its clients append /v1 by themselves
    "GOOGLE_GEMINI_BASE_URL": "",  # and /v1beta
    # Where LangChain's clients, litellm and CAMEL look first, LlamaIndex at no other.
    **{"OPENAI_API_BASE": "/v1", "OPENAI_API_BASE_URL": "/v1", "ANTHROPIC_API_BASE": "", "ANTHROPIC_API_URL": ""},
}
"""Variables in which clients look for an address, and what they want behind it."""
VARIABLES = (*_ADDRESSES, *KEYS, _NO_TRACES)
"""Which each episode has anew."""
_HTTP = ("httpcore", "httpcore2", "h11", "truststore", "certifi", "encodings.idna", "anyio._backends._asyncio")
_OPENAI = (
    *("openai.resources.chat.chat", "openai.resources.chat.completions.completions", "openai.lib.streaming.chat"),
    *("openai.resources.responses.responses", "openai.lib._parsing._responses", "openai.lib.streaming.responses"),
    *("openai.types.chat.completions", *_HTTP),
)
_ANTHROPIC = ("anthropic.resources.messages", *_HTTP)
PACKAGES = {
    **dict.fromkeys(("anthropic", "langchain_anthropic"), _ANTHROPIC),
    **dict.fromkeys(("openai", "agents", "autogen_ext", "camel", "dspy", "langchain_openai", "litellm"), _OPENAI),
    **dict.fromkeys(("llama_index", "smolagents", "strands"), _OPENAI),
    "pydantic_ai": ("pydantic_ai.models.openai", *_OPENAI),
    **dict.fromkeys(("agno", "google.genai", "haystack", "httpx", "mcp"), _HTTP),
    **dict.fromkeys(("autogen_agentchat", "autogen_core", "langchain", "langchain_core", "langgraph"), _HTTP),
    "pydantic": (),
}
"""What agents are written with: imported once for all of them, with what a first call imports, where that is installed.
Nothing that plays or draws: a generator made at an import would draw the same in each episode."""
OURS = ("datamodules.processes.environment", "datamodules.prompts")
"""Modules in which what an episode is sent is written: its function's wrapper, its task."""
_MOST_SHOWN = 500  # characters of a service's refusal
_MOST_ANSWER = 1 << 20  # bytes
_AGAIN_S = 1.0  # between two looks at a service that went away
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class Processes:
    """Agents run in processes of this machine.

    Args:
        imports: names of modules that are imported once for all episodes, beside the packages that agents are written
            with: what takes long to import and is the same in each. None that holds something of an episode (a client,
            a session), or that draws numbers by a generator of its own, which would draw the same in each.

    Raises:
        ValueError: no such module.
    """

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self.imports = tuple(imports)
        for name in self.imports:
            try:
                found = importlib.util.find_spec(name)
            except (ImportError, ValueError):
                found = None
            if found is None:
                raise ValueError(f"Processes.imports: there is no module {name!r} on the path of this run")


@dataclass(frozen=True)
class Door:
    """Where an agent finds its session.

    Attributes:
        address: to which protocols append `/v1/...`.
        key: of the session.
        ended: set when the agent said that it is done.
        held_s: seconds so far in which its calls were held, or the engine stood still.
    """

    address: str
    key: str
    ended: asyncio.Event
    held_s: Callable[[], float]

    @property
    def held(self) -> Held:
        """Seconds that an agent's deadline does not count."""
        return Held(self.held_s, f"{self.address}/held", self.key)

    @property
    def variables(self) -> dict[str, str]:
        """For an agent's environment."""
        # With `openai-agents`, which would send the session's key, and what was said, to its maker's address for
        # traces, and be refused there; whoever has another place for traces says so in the run's environment.
        quiet = {_NO_TRACES: "1"} if _NO_TRACES not in os.environ else {}
        return {
            **quiet,
            **{name: f"{self.address}{path}" for name, path in _ADDRESSES.items()},
            **dict.fromkeys(KEYS, self.key),
        }


class Agent(ABC):
    """Runs one agent an episode.

    Attributes:
        finds: where it finds its session, for messages to whoever wrote it.
    """

    finds = "OPENAI_BASE_URL and OPENAI_API_KEY"

    @abstractmethod
    async def run(self, door: Door, task: Prompt, seconds: float | None, output: Path | None) -> Any:
        """What the agent answers: text, a number, or None.

        Args:
            door: of its session.
            task: what it is to do.
            seconds: it may take, without the wait for a free worker or node, and those in which it was held; None for
                a caller that sees to that.
            output: file for what it has printed, should it fail.

        Raises:
            CallFailed: it failed. DeadlinePassed: it took too long. Lost: its machine went away.
        """

    def number(self, answer: Any) -> float | None:
        """The answer as a reward; None where it is none."""
        if isinstance(answer, bool) or not isinstance(answer, int | float) or not math.isfinite(answer):
            return None
        return float(answer)

    def check(self) -> None:  # noqa: B027
        """Before a run. Raises ValueError: no episode could start it on this machine."""

    @abstractmethod
    def log_to(self, directory: Path) -> None:
        """Keeps what agents print there, a file a process."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what runs."""


def agent(
    given: str | Sequence[str] | Callable[[Prompt], Any],
    workers: int,
    memory_mb: float | None,
    keep_environment: Sequence[str] | None,
    executor: RayExecutor | Processes,
    held_out: bool = False,
) -> Agent:
    """What `given` says: a function or its import path, a command (its words, or a text of several), or a URL.

    Args:
        given: see above.
        workers: agents at a time.
        memory_mb, keep_environment: see `ProcessCalls`.
        executor: where functions and commands run.
        held_out: it plays episodes of validation.

    Raises:
        ValueError: no such function, one that processes cannot import, no command, or an option without effect.
    """
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        if memory_mb is not None or keep_environment is not None:
            raise ValueError("memory_mb and keep_environment have no effect on an agent service; remove them")
        if isinstance(executor, RayExecutor) or executor.imports:
            raise ValueError("executor has no effect on an agent service, which runs where it is; remove it")
        return ServiceAgent(given, workers)
    if isinstance(given, str):
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise ValueError(f"{given!r} is no command ({error}); write its words as a list") from error
        if len(words) != 1 or not all(part.isidentifier() for part in given.split(".")):
            given = words
    if isinstance(given, str):
        given = _imported(given)
    limits = (workers, memory_mb, keep_environment)

    def calls_of(function: Callable[..., Any], packages: Mapping[str, Sequence[str]]) -> Calls:
        if isinstance(executor, RayExecutor):
            return executor.calls({"agent": function}, *limits, held_out=held_out)
        forks = Forks(packages, VARIABLES, executor.imports, OURS)
        return ProcessCalls({"agent": function}, *limits, once=True, forks=forks)

    if callable(given):
        _check_takes_a_task(given)
        try:
            calls = calls_of(InEnvironment(given), written_with(given))
        except ValueError as error:
            raise ValueError(f"{error}; define it at the top of a module") from error
        return FunctionAgent(calls)
    if not given or not all(isinstance(word, str) and word for word in given):
        raise ValueError(f"{given!r} is no command; give its words")
    if isinstance(executor, Processes) and executor.imports:
        raise ValueError("Processes.imports have no effect on a command, which imports for itself; remove them")
    return CommandAgent(given, calls_of(run_command, {}))


def written_with(function: Callable[..., Any]) -> dict[str, list[str]]:
    """By package, the modules that an agent's episodes need not import each for itself."""
    found = modules_of(function, PACKAGES)
    return {package: [package, *modules, *PACKAGES[package]] for package, modules in found.items()}


def _imported(name: str) -> Any:
    """By its path; this process, unlike the agents', calls nothing. Raises ValueError."""
    try:
        with no_keys_needed():
            return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name!r} is no function that can be imported ({error}); a command of one word is written as a list"
        ) from error
    except Exception as error:
        raise ValueError(f"{name!r} cannot be imported: its module raised {described(error)}{place(error)}") from error


def _check_takes_a_task(function: Callable[..., Any]) -> None:
    """Raises ValueError where no episode could call it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(None)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{name}{signature} cannot be called with the task alone ({error}); it must take one positional argument,"
            " the task, and need no other"
        ) from error


class _ProcessAgent(Agent):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def log_to(self, directory: Path) -> None:
        self._calls.logs = directory

    def stop(self) -> None:
        self._calls.stop()


class FunctionAgent(_ProcessAgent):
    """Calls a function of the task, asynchronous or not, in a process of this episode's own.

    What it leaves running ends with the episode: a thread that went on into another one would speak in its session.

    Args:
        calls: has it as "agent".
    """

    async def run(self, door: Door, task: Prompt, seconds: float | None, output: Path | None) -> Any:
        shown = replace(task, answer="", solution="", tokens=(), images=())  # what is right is not for it to see
        return await self._calls.call("agent", (door.variables, shown), {}, seconds, output, door.held)


class CommandAgent(_ProcessAgent):
    """Starts a program, without a shell; the last line that is not blank that it prints is its answer.

    `{text}`, `{id}` and `{name}` of a field of the task's metadata are replaced in each word; other braces stay. The
    task stands on its standard input too, as JSON: `{"id", "text", "messages", "metadata"}`.

    Args:
        words: the program and its arguments.
        calls: has `run_command` as "agent".
    """

    def __init__(self, words: Sequence[str], calls: Calls) -> None:
        super().__init__(calls)
        self._words = list(words)

    def check(self) -> None:
        program = self._words[0]
        if _FIELD.search(program) or shutil.which(program) is not None:
            return
        if Path(program).is_file():
            raise ValueError(
                f"{program!r} is a file that cannot be started; put what runs it in front (python {program}), or"
                " chmod +x it and name it by its path (./)"
            )
        raise ValueError(f"there is no program {program!r}; correct its name, or give its path")

    async def run(self, door: Door, task: Prompt, seconds: float | None, output: Path | None) -> Any:
        words = [_filled(word, task) for word in self._words]
        given = json.dumps(_shown(task), ensure_ascii=False)
        return await self._calls.call("agent", (door.variables, words, given), {}, seconds, output, door.held) or None

    def number(self, answer: Any) -> float | None:
        try:
            return super().number(float(answer or "none"))
        except ValueError:
            return None


class ServiceAgent(Agent):
    """POSTs each task to an agent that runs elsewhere: `{"task": {"id", "text", "messages", "metadata"},
    "openai_base_url", "anthropic_base_url", "api_key"}`.

    It answers once the agent is done, with nothing or `{"answer": text or number}`; or at once with status 202, and
    POSTs to the session's `/end` when the agent is done.

    Args:
        url: of the service.
        workers: tasks it is given at a time.
        patience_s: seconds to wait for a service that answered before and takes no connection now, as one does that is
            started anew. It was told nothing of the task then, so that it can be asked again.
    """

    finds = "the openai_base_url (anthropic_base_url) and api_key that are POSTed with its task"

    def __init__(self, url: str, workers: int, patience_s: float = 120.0) -> None:
        if not urlsplit(url).hostname:
            raise ValueError(f"{url!r} is no URL of a service")
        self._url = url
        self._workers = workers
        self._patience_s = patience_s
        self._answered = False  # it has, once
        self._gone = False  # which was said
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, door: Door, task: Prompt, seconds: float | None, output: Path | None) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._workers)
        async with self._free:
            return await within(seconds, self._ask(door, task), door.held)

    def log_to(self, directory: Path) -> None:
        pass  # it prints elsewhere

    def stop(self) -> None:
        pass

    async def _ask(self, door: Door, task: Prompt) -> Any:
        body = {
            "task": _shown(task),
            "openai_base_url": door.variables["OPENAI_BASE_URL"],
            "anthropic_base_url": door.variables["ANTHROPIC_BASE_URL"],
            "api_key": door.key,
        }
        status, said = await self._posted(body)
        if status == 202:
            await door.ended.wait()
            return None
        text = said.decode("utf-8", "replace")
        if not 200 <= status < 300:
            raise CallFailed(f"answered with status {status}: {text[:_MOST_SHOWN].replace(door.key, '...')}")
        if not text.strip():
            return None
        try:
            answer = json.loads(text).get("answer")
        except (ValueError, AttributeError, RecursionError) as error:
            raise CallFailed(
                f'answered with what is not an object {{"answer": ...}}: {text[:_MOST_SHOWN].replace(door.key, "...")}'
            ) from error
        if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
            raise CallFailed(f"answered with an answer that is {type(answer).__name__}; it must be text or a number")
        return answer

    async def _posted(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer. Raises CallFailed: it went away, or is not there."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while True:
            try:
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
                    client.post(self._url, json=body, allow_redirects=False) as response,  # the key is for this one
                ):
                    said = await response.content.read(_MOST_ANSWER)
                    while len(said) < _MOST_ANSWER and (more := await response.content.read(_MOST_ANSWER - len(said))):
                        said += more
                if self._gone:
                    _log.warning("the agent service at %s answers again", self._url)
                self._answered, self._gone = True, False
                return response.status, said
            except aiohttp.ClientConnectorError as error:
                if not self._answered or loop.time() >= until:
                    waited = f" for {self._patience_s:g} s" if self._answered else ""
                    raise CallFailed(
                        f"cannot be asked at {self._url}{waited}: {error}; start the service, or correct its address"
                    ) from error
                if not self._gone:
                    self._gone = True
                    told = "the agent service at %s takes no connection (%s); it is waited for, for %g s an episode"
                    _log.warning(told, self._url, error, self._patience_s)
                await asyncio.sleep(_AGAIN_S)
            except aiohttp.ClientError as error:
                raise CallFailed(
                    f"broke off at {self._url}: {error or type(error).__name__}; what it did for this task is lost"
                ) from error


def _shown(task: Prompt) -> dict[str, Any]:
    """What an agent may know of a task; not the answer."""
    return {"id": task.id, "text": task.text, "messages": list(task.messages), "metadata": task.metadata}


def _filled(word: str, task: Prompt) -> str:
    fields = {**task.metadata, "id": task.id, "text": task.text}

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in fields:
            why = "is not for the agent to see" if name == "answer" else "is no field of the task"
            raise CallFailed(f"cannot be started: {{{name}}} {why}; there are {', '.join(sorted(fields))}")
        one = fields[name]
        return one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)

    return _FIELD.sub(value, word)
