"""Sessions with OpenEnv servers over their wire protocol (`openenv-core` 0.3, `openenv` 0.10): JSON on a WebSocket.

    {"type": "reset", "data": {...}}, {"type": "step", "data": ACTION}, {"type": "close"}, to URL/ws
    {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}, or
    {"type": "error", "data": {"message": "...", "code": "..."}}, from there

Promises: one connection is one environment, and ends with whoever holds it; every wait has a deadline, and a session
that passed one is not used again; what is no such answer is an error that says so. Nothing of OpenEnv is imported: its
client wants older libraries than training does.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app import checks
from app.batch import LARGEST_REWARD
from datamodules.processes.deadline import deadline
from datamodules.prompts.base import Prompt
from datamodules.prompts.extras import needs

needs("aiohttp", "agents", "OpenEnv's adapter")

import aiohttp  # noqa: E402

_MOST_BYTES = 16 << 20  # of a message
_MOST_SHOWN = 500  # characters of an error
_CLOSE_S = 5.0
REFUSED = "VALIDATION_ERROR"
"""The code of an action that does not fit the environment's schema; it has changed nothing."""
FAILED = "EXECUTION_ERROR"
"""The code of an environment that raised."""
_FULL = "CAPACITY_REACHED"


class EnvironmentLost(RuntimeError):
    """The session is over; the message says why."""


class StepRefused(RuntimeError):
    """The environment refuses what it was asked, or failed at it; the session goes on.

    Attributes:
        code: the protocol's word for it.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Outcome:
    """What an environment answers.

    Attributes:
        observation: its fields.
        reward: of the last action, None where there is none.
        done: whether the episode is over.
    """

    observation: dict[str, Any]
    reward: float | None
    done: bool


@dataclass(frozen=True)
class Server:
    """A server that runs already.

    Attributes:
        url: its base, http://host:port; `/ws` and `/schema` are appended.
        connect_s: seconds in which a session must begin.
        step_s: seconds for an answer.
        header_variables: HTTP header -> the environment variable that has its value.
        owner: whose options these are, for errors.
    """

    url: str
    connect_s: float
    step_s: float
    header_variables: Mapping[str, str]
    owner: str

    def __post_init__(self) -> None:
        checks.deadline({f"{self.owner}.connect_s": self.connect_s, f"{self.owner}.step_s": self.step_s})
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.owner}.url: {self.url!r} does not begin with http:// or https://")

    def headers(self) -> dict[str, str]:
        """Raises ValueError: a variable is not set."""
        for header, variable in self.header_variables.items():
            if variable not in os.environ:
                raise ValueError(
                    f"{self.owner}.header_variables: {header}: the environment variable {variable} is not set"
                )
        return {header: os.environ[variable] for header, variable in self.header_variables.items()}

    async def actions(self) -> dict[str, Any]:
        """The JSON schema of an action. Raises ValueError: the server cannot be reached, or is none of OpenEnv."""
        timeout = aiohttp.ClientTimeout(total=self.connect_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self.headers()) as client,
                client.get(f"{self.url.rstrip('/')}/schema") as answer,
            ):
                found = json.loads(await answer.text()) if answer.status == 200 else f"status {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            said = str(error)[:_MOST_SHOWN] or type(error).__name__
            raise ValueError(f"{self.owner}.url: no OpenEnv server answers at {self.url} ({said}); start it") from error
        schema = found.get("action") if isinstance(found, dict) else None
        if not isinstance(schema, dict):
            raise ValueError(
                f"{self.owner}.url: {self.url}/schema gives no schema of actions ({str(found)[:80]});"
                " name the base URL of an OpenEnv server"
            )
        return schema


class Environment:
    """One session.

    Args:
        server: to have it with.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._turn = asyncio.Lock()  # one question at a time: answers come in their order and carry no number

    @property
    def is_over(self) -> bool:
        return self._socket is None

    async def open(self) -> None:
        """Connects. Raises EnvironmentLost."""
        server = self._server
        self._client = aiohttp.ClientSession(headers=server.headers())
        try:
            async with deadline(server.connect_s):
                self._socket = await self._client.ws_connect(f"{server.url.rstrip('/')}/ws", max_msg_size=_MOST_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            said = f"not within {server.connect_s:g} s (connect_s)" if isinstance(error, TimeoutError) else str(error)
            raise EnvironmentLost(f"the environment at {server.url} gives no session: {said[:_MOST_SHOWN]}") from error

    async def reset(self, fields: Mapping[str, Any]) -> Outcome:
        """Begins an episode. Raises EnvironmentLost, StepRefused."""
        return await self._ask({"type": "reset", "data": dict(fields)})

    async def step(self, action: Mapping[str, Any]) -> Outcome:
        """Raises EnvironmentLost, StepRefused."""
        return await self._ask({"type": "step", "data": dict(action)})

    async def close(self) -> None:
        """Ends the session, which frees its place."""
        socket, self._socket = self._socket, None
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            if socket is not None and not socket.closed:
                async with asyncio.timeout(_CLOSE_S):
                    await socket.send_json({"type": "close"})
                    while (await socket.receive()).type is aiohttp.WSMsgType.TEXT:
                        pass  # the server hangs up once the place is free
                    await socket.close()
        if self._client is not None:
            await self._client.close()

    async def _ask(self, message: dict[str, Any]) -> Outcome:
        async with self._turn:
            try:
                return await self._exchange(message)
            except asyncio.CancelledError:  # by a tool's deadline: the late answer would be the next call's
                self._socket = None  # `close` hangs up with the client
                raise

    async def _exchange(self, message: dict[str, Any]) -> Outcome:
        if self._socket is None:
            raise EnvironmentLost(f"the session with the environment at {self._server.url} is over")
        asked = f"the environment at {self._server.url}, asked to {message['type']},"
        try:
            async with deadline(self._server.step_s):
                await self._socket.send_json(message)
                answer = await self._socket.receive()
        except TimeoutError as error:
            await self.close()  # a late answer would be taken for that of the next step
            raise EnvironmentLost(f"{asked} did not answer within {self._server.step_s:g} s (step_s)") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentLost(f"{asked} was lost: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            said = answer.data if answer.type is aiohttp.WSMsgType.ERROR else answer.extra or "no reason given"
            raise EnvironmentLost(f"{asked} ended the session: {said}")
        return _outcome(str(answer.data), asked)


def reset_by(prompt: Prompt, fields: Sequence[str], owner: str) -> dict[str, Any]:
    """What `reset` is given for a prompt. Raises ValueError: its metadata has no such field."""
    if stray := [name for name in fields if name not in prompt.metadata]:
        raise ValueError(
            f"prompt '{prompt.id}': its metadata has no field '{stray[0]}', which {owner}.reset_fields names; it has"
            f" {', '.join(prompt.metadata) or 'none'}"
        )
    return {name: prompt.metadata[name] for name in fields}


def _details(errors: Any) -> str:
    """What does not fit in an action, as the server's own library says it."""
    try:
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors or [])
    except (TypeError, KeyError):
        return json.dumps(errors)


def _outcome(text: str, asked: str) -> Outcome:
    try:
        found = json.loads(text)
        kind, data = found["type"], found["data"]
        if kind == "error":
            message, code = str(data["message"]), str(data["code"])
        elif kind == "observation":
            observation, reward, done = data["observation"], data.get("reward"), data.get("done", False)
        else:
            raise ValueError(f"type {kind!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EnvironmentLost(f"{asked} gave what is no answer of OpenEnv ({text[:80]!r}); check url") from error
    if kind == "error":
        if code == _FULL:
            raise EnvironmentLost(
                f"{asked} has no session left ({message[:_MOST_SHOWN]}); lower sessions, or let the server give more"
                " (max_concurrent_envs)"
            )
        refused = StepRefused((_details(data.get("errors")) or message)[:_MOST_SHOWN], code)
        if code in (REFUSED, FAILED):
            raise refused
        raise EnvironmentLost(f"{asked} failed: {refused} ({code})")
    if not isinstance(observation, dict) or not isinstance(done, bool):
        raise EnvironmentLost(f"{asked} gave what is no answer of OpenEnv ({text[:80]!r}); check url")
    if reward is not None and not (type(reward) in (int, float) and abs(reward) <= LARGEST_REWARD):  # nor NaN
        raise EnvironmentLost(
            f"{asked} gave a reward that is no number within {LARGEST_REWARD:g}: {str(reward)[:40]}; scale it down"
        )
    return Outcome(observation, None if reward is None else float(reward), done)
