"""Environments of the package OpenEnv for tests, behind its own server: PYTHON openenv_server.py KIND [SESSIONS].

Prints the address once it listens. KIND is "guess", a number to be found by typed actions, "echo", which takes any
text, or "tools", a calculator whose actions are calls of tools.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    tries: int


class Guessing(Environment):
    """The number is the seed. 13 breaks it, 99 takes long, 77 earns nothing, 55 ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self._state = State(episode_id=episode_id, step_count=0, number=seed or 0)
        return Hint(hint=f"Find the number {more.get('range', 'from 0 to 9')}.", tries=0)

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        self._state.step_count += 1
        wanted, tries = self._state.number, self._state.step_count
        match action.number:
            case 13:
                raise RuntimeError("unlucky")
            case 99:
                time.sleep(5)
            case 77 | 55:
                return Hint(hint="No.", tries=tries, done=action.number == 55)
        if action.number == wanted:
            return Hint(hint="Right.", tries=tries, reward=1.0, done=True)
        return Hint(hint="Higher." if action.number < wanted else "Lower.", tries=tries, reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


class Said(Action):
    message: str


class Echo(Observation):
    response: str


class Echoing(Environment):
    """Worth a tenth for each character; done after two steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Echo:
        self._state = State(episode_id=episode_id, step_count=0)
        return Echo(response="Say something.")

    def step(self, action: Said, timeout_s: float | None = None, **more: Any) -> Echo:
        self._state.step_count += 1
        return Echo(response=action.message, reward=len(action.message) / 10, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


class Calculator(MCPEnvironment):
    """Worth 1 for each sum; it is done after three."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("calculator")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        @tools.tool
        def fail() -> str:
            """Fails."""
            raise ValueError("no such order")

        super().__init__(tools)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(done=False, reward=0.0)

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        found = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(found, CallToolObservation):
            self._state.step_count += 1
            found.reward = 1.0 if found.tool_name == "add" and found.error is None else None
            found.done = self._state.step_count == 3
        return found

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return self._state


KINDS: dict[str, Any] = {
    "guess": (Guessing, Guess, Hint),
    "echo": (Echoing, Said, Echo),
    "tools": (Calculator, CallToolAction, CallToolObservation),
}


def main() -> None:
    kind, sessions = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 4
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=sessions)
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
