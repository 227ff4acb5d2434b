"""An environment of OpenEnv whose actions are calls of tools (its MCP environments), as tools of `ToolWorkflow`.

Promises: the tools are those that the server lists when rollouts begin; each episode has a session of its own, reset
before its first call, and the reward is the environment's own. A tool's error is told to the model; an environment that
cannot be reached, breaks off, is late or gives no reward costs the group and is never scored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from app import checks
from datamodules.processes.calls import CallFailed
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.openenv import Environment, EnvironmentLost, Server, StepRefused, reset_by
from datamodules.workflows.calling import in_a_thread
from datamodules.workflows.tools import Toolbox, ToolsLost

Rewards = Literal["sum", "last", "configured"]


class OpenEnvTools(Toolbox):
    """The tools of an environment of a server that runs already, which must give a session to every episode that is
    played at a time (its max_concurrent_envs), those of validation included.

    What `reset` shows is not shown to the model: the prompt is the task. Once the environment is done, further calls
    are told so.

    Args:
        url: the server's base.
        reset_fields: fields of the prompt's metadata that `reset` is given, such as a seed: what makes the samples of a
            group play the same task.
        rewards: "sum" of the calls' rewards, the "last" one that was given, or "configured": the data's reward of the
            last reply.
        allow: names of the tools to offer; None for all.
        connect_s: seconds in which a session must begin.
        step_s: seconds that the environment may take for a reset or a call.
        header_variables: HTTP header -> the environment variable that has its value.

    Raises:
        ValueError: an argument out of range.
        ImportError: without the extra `agents`.
    """

    def __init__(
        self,
        url: str,
        reset_fields: Sequence[str] = (),
        rewards: Rewards = "sum",
        allow: list[str] | None = None,
        connect_s: float = 10.0,
        step_s: float = 60.0,
        header_variables: Mapping[str, str] | None = None,
    ) -> None:
        checks.one_of("OpenEnvTools.rewards", rewards, get_args(Rewards))
        self.tools: list[dict[str, Any]] = []
        self._server = Server(url, connect_s, step_s, header_variables or {}, "OpenEnvTools")
        self._reset_fields = tuple(reset_fields)
        self._rewards: Rewards = rewards
        self._allow = allow

    def prepare(self) -> None:
        """Asks the server, in a session of its own, what tools it has. Raises ValueError: it cannot be reached, has
        none, or not those that `allow` names."""
        found = in_a_thread(self._listed)
        names = [one["name"] for one in found]
        if stray := [name for name in self._allow or () if name not in names]:
            raise ValueError(f"OpenEnvTools.allow: there is no tool '{stray[0]}'; there are {', '.join(names)}")
        self.tools = [
            {
                "type": "function",
                "function": {
                    "name": one["name"],
                    "description": one.get("description") or "",
                    "parameters": one.get("input_schema") or one.get("inputSchema") or {"type": "object"},
                },
            }
            for one in found
            if self._allow is None or one["name"] in self._allow
        ]

    async def open(self, prompt: Prompt) -> Toolbox:
        """A session, reset for the prompt's task."""
        fields = reset_by(prompt, self._reset_fields, "OpenEnvTools")
        environment = Environment(self._server)
        try:
            await environment.open()
            await environment.reset(fields)
        except BaseException:
            await environment.close()
            raise
        kind = _EpisodeTools if self._rewards == "configured" else _RewardedTools
        return kind(self.tools, environment, self._rewards)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        raise NotImplementedError("tools of an environment are called in an episode; see open")

    async def _listed(self) -> list[dict[str, Any]]:
        environment = Environment(self._server)
        try:
            await environment.open()
            found = (await environment.step({"type": "list_tools"})).observation.get("tools")
        except (EnvironmentLost, StepRefused) as error:
            raise ValueError(f"OpenEnvTools.url: {self._server.url} lists no tools: {error}") from error
        finally:
            await environment.close()
        if not found or not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found):
            raise ValueError(
                f"OpenEnvTools.url: the environment at {self._server.url} has no tools; where its actions are no calls,"
                " use OpenEnvWorkflow"
            )
        return list(found)


class _EpisodeTools(Toolbox):
    """Those of an episode, in its session."""

    def __init__(self, tools: list[dict[str, Any]], environment: Environment, rewards: Rewards) -> None:
        self.tools = tools
        self._environment, self._rewards = environment, rewards
        self._earned: list[float] = []
        self._calls = 0
        self._done = False

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._done:
            raise CallFailed("the environment's episode is over; answer without a call")
        try:
            outcome = await self._environment.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        except StepRefused as error:
            raise CallFailed(str(error)) from error
        except EnvironmentLost as error:
            raise ToolsLost(str(error)) from error
        self._calls += 1
        self._done = outcome.done
        if outcome.reward is not None:
            self._earned.append(outcome.reward)
        if fault := outcome.observation.get("error"):
            raise CallFailed(str(fault.get("message") if isinstance(fault, dict) else fault))
        return _text(outcome.observation.get("result"))

    async def close(self) -> None:
        await self._environment.close()


class _RewardedTools(_EpisodeTools):
    async def reward(self, prompt: Prompt, reply: str) -> float:
        """Of the episode; 0 where it made no call.

        Raises:
            ToolsLost: a call passed its deadline, and with it the session. ValueError: the environment gave none.
        """
        if self._environment.is_over:
            raise ToolsLost("a call passed its deadline, so that what the episode earned is not known")
        if self._calls and not self._earned:
            raise ValueError(
                f"prompt '{prompt.id}': the environment gave no reward in {self._calls} calls; set rewards: configured,"
                " and the data's reward"
            )
        return sum(self._earned) if self._rewards == "sum" else (self._earned or [0.0])[-1]


def _text(result: Any) -> str:
    """What a result says: MCP's blocks of text, where it has them, or all of it."""
    blocks = result.get("content") if isinstance(result, dict) else None
    if (
        isinstance(blocks, list)
        and blocks
        and all(isinstance(one, dict) and one.get("type") == "text" for one in blocks)
    ):
        return "\n".join(str(one.get("text")) for one in blocks)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
