"""An agent as it is: a program that talks to a provider's API, and does not know that it is trained.

Promises: the agent runs in a process of its own, with the address and key of its session where the providers' clients
look for them (`OPENAI_BASE_URL`, `OPENAI_API_KEY`); every reply it was given is a training sequence, exactly as it was
sampled. An agent that fails, or an engine that does, costs its group, and is never scored; one that has spent its
budget is scored for what it did.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationError
from datamodules.processes.calls import CallFailed, ProcessCalls
from datamodules.processes.environment import InEnvironment
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway.server import Gateway
from datamodules.workflows.gateway.sessions import Budget, Sampling, Session
from datamodules.workflows.tool_calls import ToolCall, hermes_calls
from datamodules.workflows.turns import ReplyOptions


class AgentWorkflow:
    """Plays an episode by calling `agent(prompt)`.

    Its reward is the configured one, of the text that the agent returns, or of its last reply where it returns none;
    without a configured reward the number that was posted to the session's `/reward`, or that the agent returns.

    Args:
        agent: the import path of a function, asynchronous or not, of a `datamodules.prompts.base.Prompt`; or class_path
            and init_args of a callable class.
        max_new_tokens: most tokens of a reply, whatever a call asks for; at least 1.
        temperature: of calls that name none.
        budget: what an episode may use; see `datamodules.workflows.gateway.Budget`.
        parser: finds the calls of tools in a reply: `datamodules.workflows.hermes_calls`, `json_calls` or a function of
            your own.
        workers: agents that run at a time, a process each; at least 1. An episode that waits for one to be free spends
            its own time (`data.limits.episode_deadline_s`).
        keep_environment: environment variables they may see though their names look like secrets.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`.

    Raises:
        ValueError: an argument out of range; an agent that other processes cannot import.
    """

    def __init__(
        self,
        agent: Callable[[Prompt], Any],
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        budget: Budget | None = None,
        parser: Callable[[str], list[ToolCall]] = hermes_calls,
        workers: int = 8,
        keep_environment: list[str] | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        name = type(self).__name__
        checks.at_least(1, {f"{name}.workers": workers})
        ReplyOptions(name, max_new_tokens, temperature)  # checks both
        self.max_new_tokens = max_new_tokens
        self._sampling = Sampling(max_new_tokens, temperature)
        self._budget = budget or Budget()
        self._parser = parser
        self._template_options = template_options
        self._chat: Chat | None = None
        try:
            self._agents = ProcessCalls({"agent": InEnvironment(agent)}, workers, keep_environment=keep_environment)
        except ValueError as error:
            raise ValueError(f"{name}.agent: {error}; define it at the top of a module") from error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[Gateway] | None = None
        self._serving: asyncio.Task[None] | None = None  # kept: an event loop holds its tasks weakly

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tries the chat template. Raises ValueError without one."""
        self._chat = Chat(tokenizer, options=self._template_options)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The task as a user's message; what the agent sends is its own."""
        return tuple(self._template().prompt(prompt.conversation()))

    def close(self) -> None:
        """Ends the agents' processes."""
        self._agents.stop()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        gateway = await self._gateway()
        session = Session(engine, self._template(), self._sampling, self._budget, self._parser)
        address = gateway.admit(session)
        try:
            with engine.waiting("agent", prompt.id):
                result = await self._agents.call("agent", (_environment(address, session.key), prompt), {}, None)
        except CallFailed as error:
            if session.fault is not None:
                raise GenerationError(f"the engine failed under the agent: {session.fault}") from session.fault
            if not session.exhausted:
                raise CallFailed(f"the agent {error}") from error
            result = None
        finally:
            gateway.dismiss(session)
        if session.fault is not None:
            raise GenerationError(f"the engine failed under the agent: {session.fault}") from session.fault
        if not session.transcript.calls:
            raise CallFailed(
                "the agent asked for no reply; it must call the API at OPENAI_BASE_URL, as the openai package does"
            )
        text = result if isinstance(result, str) else session.text()
        found = session.trajectories(prompt, await self._score(engine, prompt, session, result, text))
        for one in found:
            one.metadata |= {"completion": text, "answer": prompt.answer}
        return found

    async def _score(self, engine: EpisodeEngine, prompt: Prompt, session: Session, result: Any, text: str) -> float:
        if engine.has_reward:
            return await engine.score(prompt, text)
        value = result if session.reward is None else session.reward
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(
                f"prompt '{prompt.id}': the agent returned {type(result).__name__} and posted no reward; return a"
                " number, POST one to <session>/reward, or set the data's reward"
            )
        return float(value)

    async def _gateway(self) -> Gateway:
        """Listening on this event loop, until that ends."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._opened is None:
            self._loop, self._opened = loop, loop.create_future()
            self._serving = loop.create_task(_serve(self._opened))
        return await asyncio.shield(self._opened)

    def _template(self) -> Chat:
        assert self._chat is not None, "prepare comes first"
        return self._chat


def _environment(address: str, key: str) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{address}/v1", "OPENAI_API_KEY": key}


async def _serve(opened: asyncio.Future[Gateway]) -> None:
    gateway = Gateway()
    try:
        await gateway.open()
    except BaseException as error:
        if not opened.done():
            opened.set_exception(error)
        return
    opened.set_result(gateway)
    try:
        await asyncio.Event().wait()  # until the loop ends, which cancels its tasks
    finally:
        await gateway.close()
