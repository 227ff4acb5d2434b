"""An environment of OpenEnv as an episode: what it shows is a user's message, the model's reply the next action.

Promises: the ids of every turn are exactly those served (see `datamodules.workflows.turns`); the reward is the
environment's own. An environment that cannot be reached, breaks off, is late or is done without a reward costs the
group and is never scored; an action that it refuses is told to the model and counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import CALL_REWARD, Trajectory
from datamodules.conversations.chat_template import Chat, Message
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.openenv import (
    REFUSED,
    Environment,
    EnvironmentLost,
    Outcome,
    Server,
    StepRefused,
    reset_by,
)
from datamodules.workflows.base import EpisodeEngine, Workflow
from datamodules.workflows.calling import in_a_thread
from datamodules.workflows.tool_calls import said_aloud
from datamodules.workflows.turns import ReplyOptions, Sequences, Turns, tokenized

Rewards = Literal["sum", "last", "steps"]
_Turn = tuple[str, float | None, bool]  # what the model is told, the step's reward, whether the episode is over


class OpenEnvWorkflow(Workflow):
    """Plays an environment of a server that runs already: reset, then a reply a step, until it is done.

    The model's first prompt is the prompt's, and behind it what `reset` shows. An episode ends when the environment is
    done ("stop"), with a reply cut off or a context that is full ("length"), or after the last turn ("max_turns"); in
    the last two cases it has earned what its steps gave, 0 where they gave nothing. The metadata counts `steps`, and,
    where there were any, `malformed_actions` and `refused_actions`, which were told to the model, and
    `quoted_observations` (they spelled special tokens, which got a space put into them).

    Args:
        url: the server's base.
        action: field of the environment's action that takes the reply, without its thoughts; None where the reply is
            the whole action as a JSON object.
        observation: what is shown of an observation, its fields in braces; None for all of it as JSON.
        reset_fields: fields of the prompt's metadata that `reset` is given, such as a seed: what makes the samples of a
            group play the same task.
        rewards: "sum" of the steps' rewards; the "last" one that was given, for environments that say how far one has
            come; or "steps", each at the last token of its own reply (`app.batch.CALL_REWARD`), and 0 for the episode
            beside them: needs sequences of turns.
        tell_failures: whether the model is told of a step at which the environment raised; otherwise that costs the
            group.
        sessions: that the server gives at a time (its max_concurrent_envs); other episodes wait. Validation has as many
            of its own.
        max_turns: most replies, at least 1.
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway, that end a reply (each must be one token).
        sequences: "whole", "turns" or "rendered"; see `datamodules.workflows.turns.Sequences`.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`.
        connect_s: seconds in which a session must begin.
        step_s: seconds that the environment may take for a reset or a step.
        header_variables: HTTP header -> the environment variable that has its value.

    Raises:
        ValueError: an argument out of range, or two that do not go together.
        ImportError: without the extra `agents`.
    """

    def __init__(
        self,
        url: str,
        action: str | None,
        observation: str | None = None,
        reset_fields: Sequence[str] = (),
        rewards: Rewards = "sum",
        tell_failures: bool = False,
        sessions: int = 1,
        max_turns: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
        sequences: Sequences = "whole",
        template_options: dict[str, Any] | None = None,
        connect_s: float = 10.0,
        step_s: float = 60.0,
        header_variables: Mapping[str, str] | None = None,
    ) -> None:
        name = type(self).__name__
        checks.at_least(1, {f"{name}.max_turns": max_turns, f"{name}.sessions": sessions})
        checks.one_of(f"{name}.rewards", rewards, get_args(Rewards))
        checks.one_of(f"{name}.sequences", sequences, get_args(Sequences))
        if rewards == "steps" and sequences == "whole":
            raise ValueError(
                f"{name}.rewards: steps, which need a sequence a turn; set sequences: turns, or rewards: sum"
            )
        self.max_turns = max_turns
        self.max_new_tokens = max_new_tokens
        self.sequences: Sequences = sequences
        self.stop = tuple(stop)
        self._options = ReplyOptions(name, max_new_tokens, temperature, stop)
        self._server = Server(url, connect_s, step_s, header_variables or {}, name)
        self._action, self._observation = action, observation
        self._reset_fields = tuple(reset_fields)
        self._rewards, self._tell_failures = rewards, tell_failures
        self._sessions = sessions
        self._template_options = template_options
        self._chat: Chat | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tries the chat template and asks the server for its actions. Raises ValueError: it cannot be reached, or
        `action` is none of their fields."""
        self._options.prepare(tokenizer)
        self._chat = Chat(tokenizer, options=self._template_options)
        if self.sequences != "rendered":
            self._chat.after_reply([{"role": "user", "content": "."}])
        known = list(in_a_thread(self._server.actions).get("properties", {}))
        if self._action is not None and self._action not in known:
            remedy = "; its actions are tools: use OpenEnvTools" if "tool_name" in known else ""
            raise ValueError(
                f"OpenEnvWorkflow.action: an action of this environment has no field '{self._action}', but"
                f" {', '.join(known) or 'none'}{remedy}"
            )

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids an episode begins with, but for what the environment shows."""
        return tuple(self._template().prompt(prompt.conversation()))

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if engine.has_reward:
            raise ValueError("OpenEnvWorkflow: rewards are the environment's; leave the data's reward out (null)")
        fields = reset_by(prompt, self._reset_fields, "OpenEnvWorkflow")
        async with self._session(engine) as environment:
            with engine.waiting("environment", "reset"):
                begun = await environment.reset(fields)
            if begun.done:
                raise EnvironmentLost(f"the environment at {self._server.url} was done when it was reset")
            turns, earned, metadata = await self._play(engine, prompt, environment, begun)
        if metadata["done"] and all(one is None for one in earned):
            raise ValueError(
                f"prompt '{prompt.id}': the environment was done after {metadata['steps']} steps and gave no reward;"
                " only one with rewards can be trained on"
            )
        return self._trajectories(turns, earned, metadata)

    async def _play(
        self, engine: EpisodeEngine, prompt: Prompt, environment: Environment, begun: Outcome
    ) -> tuple[Turns, list[float | None], dict[str, object]]:
        """The conversation, the reward of each turn, and the metadata."""
        chat, tokenizer, counts = self._template(), engine.tokenizer, Counter[str]()
        messages = _begun(prompt, self._shown(begun.observation, counts))
        turns = Turns(prompt, self._options, chat.prompt(messages))
        earned: list[float | None] = []
        reply, done = "", False
        while (response := await turns.generate(engine)) is not None:
            reply = turns.reply(tokenizer)
            if response.finish_reason == "length":
                break
            said = turns.reply(tokenizer, special=True)
            told, reward, done = await self._step(engine, environment, said_aloud(said).strip(), counts)
            earned.append(reward)
            if done:
                break
            if turns.count == self.max_turns:
                turns.finish_reason = "max_turns"
                break
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
            if self.sequences == "rendered":
                turns.rewrite(await tokenized(chat.prompt, messages), engine.image_processor)
            else:
                after_reply = partial(chat.after_reply, last=turns.end, ends=engine.ends.ids)
                turns.extend(await tokenized(after_reply, messages[-1:]))
        steps = counts["steps"]
        return turns, earned, {"completion": reply, "answer": prompt.answer, "done": done, **counts, "steps": steps}

    async def _step(self, engine: EpisodeEngine, environment: Environment, said: str, counts: Counter[str]) -> _Turn:
        action: Any = {self._action: said}
        if self._action is None:
            try:
                action = json.loads(said, strict=False)
            except (ValueError, RecursionError) as error:
                action = str(error)[:200] or "nested too deep"
            if not isinstance(action, dict):
                counts["malformed_actions"] += 1
                why = action if isinstance(action, str) else f"this is a {type(action).__name__}"
                return f"Error: the reply must be one JSON object, the action ({why})", None, False
        try:
            with engine.waiting("environment", "step"):
                outcome = await environment.step(action)
        except StepRefused as error:
            if error.code != REFUSED and not self._tell_failures:
                raise
            counts["refused_actions"] += 1
            return f"Error: {self._template().quoted(str(error))}", None, False
        counts["steps"] += 1
        told = "" if outcome.done else self._shown(outcome.observation, counts)
        return told, outcome.reward, outcome.done

    def _shown(self, observation: dict[str, Any], counts: Counter[str]) -> str:
        if self._observation is None:
            text = json.dumps(observation, ensure_ascii=False)
        else:
            try:
                text = self._observation.format_map(observation)
            except (KeyError, IndexError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"OpenEnvWorkflow.observation: {self._observation!r} does not fit an observation of the fields"
                    f" {', '.join(observation) or 'none'}: {type(error).__name__}: {error}"
                ) from error
        quoted = self._template().quoted(text.encode("utf-8", "replace").decode("utf-8"))
        if quoted != text:
            counts["quoted_observations"] += 1
        return quoted

    def _trajectories(
        self, turns: Turns, earned: Sequence[float | None], metadata: dict[str, object]
    ) -> list[Trajectory]:
        given = [one for one in earned if one is not None]
        reward = {"sum": float(sum(given)), "last": given[-1] if given else 0.0, "steps": 0.0}[self._rewards]
        found = turns.trajectories(self.sequences, reward, metadata)
        if self._rewards == "steps":
            for one, value in zip(found, earned):
                if value is not None:
                    one.metadata[CALL_REWARD] = value
        return found

    @asynccontextmanager
    async def _session(self, engine: EpisodeEngine) -> AsyncIterator[Environment]:
        """One of the environment's, as soon as there is a place for it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Of training, and of validation: episodes of the first wait, each with its session, for the second.
            self._loop, self._places = loop, [asyncio.Semaphore(self._sessions) for _ in range(2)]
        place = self._places[engine.is_held_out]
        with engine.waiting("environment", "session"):
            await place.acquire()
        environment = Environment(self._server)
        try:
            with engine.waiting("environment", "session"):
                await environment.open()
            yield environment
        finally:
            try:
                await environment.close()
            finally:
                place.release()

    def _template(self) -> Chat:
        assert self._chat is not None, "prepare comes first"
        return self._chat


def _begun(prompt: Prompt, shown: str) -> list[Message]:
    """The prompt, and what the environment shows behind it."""
    messages = prompt.conversation()
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": shown}]
    text = "\n\n".join(one for one in (messages[-1]["content"], shown) if one)
    return [*messages[:-1], {**messages[-1], "content": text}]
