"""An agent as it is: a program that talks to a provider's API, and does not know that it is trained.

Promises: the agent runs outside of this process, with the address and key of its session where the providers' clients
look for them; every reply it was given is a training sequence, exactly as it was sampled. An agent that fails, or an
engine that does, costs its group, and is never scored unless `on_failure` says what agents get whose model may be to
blame; what the first and the latest that fail have printed is kept. One that has spent its budget is scored for what it
did. One whose machine dies plays its episode again, and nothing of the first attempt is trained.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import LARGEST_REWARD, Trajectory
from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationError
from datamodules.processes.calls import CallFailed, DeadlinePassed, Lost
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.ray_executor import RayExecutor
from datamodules.workflows.base import EpisodeEngine, Misfit, PlaceholderSampled
from datamodules.workflows.gateway import agents
from datamodules.workflows.gateway.listener import check_host
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.rewards import shown
from datamodules.workflows.gateway.server import Gateway
from datamodules.workflows.gateway.sessions import Budget, Session
from datamodules.workflows.response_template import ResponseTemplate
from datamodules.workflows.tool_calls import ToolCall, hermes_calls
from datamodules.workflows.turns import ReplyOptions

_log = logging.getLogger(__name__)
_MOST_SHOWN = 1000  # characters of what a failed agent printed
_MOST_KEPT = 100  # files of those that failed first, and as many of the latest
_TRACEBACK = "Traceback (most recent call last):"
_ELSEWHERE = re.compile(
    r"[Cc]onnect|Authentication|(?<!File)(?<!Module)NotFound|\b40[134]\b|api_key|base_url|[Tt]imeout|[Tt]imed out"
)
_IMPATIENT = re.compile(r"[Tt]ime(d ?|-)?[Oo]ut")
_NEVER_BEGAN = ("cannot be asked", "broke off")  # services
_NO_REPLY_DOES = "Connect|Timeout|Authentication|MemoryError|ImportError|ModuleNotFound"  # in a name of an error
_NO_REPLY_DID = re.compile(
    r"\w*(?:Connect|Timeout|Authentication)\w*Error\b|\b(?:Connect|Read|Write|Pool)Timeout\b|MemoryError|ImportError"
    "|ModuleNotFoundError"
)
_BY_ITSELF = re.compile(rf"raised (?!\w*(?:{_NO_REPLY_DOES}))|exited with code [1-9]|answered with status 500\b")
_OF_THE_MODEL = (
    "; where the model's replies are to blame, catch it in the agent, or score such episodes: AgentWorkflow.on_failure"
)
_OF_CALLS = {
    "clamped_calls": "ask for more tokens than AgentWorkflow.max_new_tokens: {most}, which holds",
    "nameless_calls": "hold messages of several users, whose `name` the model's chat template does not show; have the"
    " agent write who speaks into the texts (autogen-ext's client: add_name_prefixes=True)",
}
"""What is told once of calls that a session counts."""
_NOBODY = "no call reached this session: does the agent set base_url or api_key itself? It must take them from {finds}"


class AgentWorkflow:
    """Plays an episode by running an agent, which answers with text, a number or nothing.

    Its reward is the configured one, of the text that it answers, or of its last reply where it answers none; without
    a configured reward the number that was posted to the session's `/reward`, or that the agent answers. What was
    posted for single calls comes on top, as `app.batch.CALL_REWARD`.

    Args:
        agent: the import path of a function, asynchronous or not, of a `datamodules.prompts.base.Prompt`, whose answer
            is what it returns; class_path and init_args of a callable class; a command with `{text}` or other fields of
            the task in it, as a text or a list of words, see `CommandAgent`; or the URL of a service, see
            `ServiceAgent`.
        max_new_tokens: most tokens of a reply, whatever a call asks for; at least 1.
        temperature: of calls that name none.
        override_sampling: it is that of all calls, and what else they say of sampling (`top_p`, penalties), of thinking
            and of verbosity is passed over; a reply in a shape (`response_format`), a forced call of a tool and one at
            most are told the model in the system's message. Without, calls that say such things are refused.
        untrainable: "refuse" them, or "serve" them, temperature 0 included: they are sampled as they ask, later calls
            go on with them and rewards see them, but there is no loss on their replies.
        budget: what an episode may use; see `datamodules.workflows.gateway.Budget`.
        parser: finds the calls in a reply: `datamodules.workflows.hermes_calls`, `json_calls`, a `ResponseTemplate` or
            a function of your own.
        workers: agents that run at a time, a process each; at least 1. An episode that waits for one to be free spends
            its own time (`data.limits.episode_deadline_s`). Agents of validation have as many of their own.
        deadline_s: seconds an agent may take, without those in which its calls are held for validation or the engine
            stands still for new weights; None for the episode's deadline.
        memory_mb: most memory of an agent with all it started, in 10^6 bytes; see `ProcessCalls`.
        keep_environment: environment variables they may see though their names look like secrets.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`.
        judged: what a configured reward is given beside the task: the text of the "answer", or the "transcript", a list
            of the calls; see `rewards.shown`.
        host: the interface on which agents find their sessions; not the loopback one for agents on other machines.
        executor: where functions and commands run: "processes" (of this machine), "ray", a `Processes` or `RayExecutor`
            with options of its own.
        on_failure: "drop" drops the group of an agent that raises, exits with another code than 0, or answers with
            status 500; a number is the reward of its episode instead, logged, with the reason as `reward_failed` in the
            metadata. Not of one that was sampled nothing to train on, or sent a request that is not served, nor where a
            connection failed. Frameworks raise for what the model has done: turns beyond a limit, a tool that is none,
            a reply that was cut off.
        show_tools: whether the model's chat template shows the tools of requests, and earlier calls, to the model; a
            template that does not ends the run. False: the agent's own messages tell of its tools, calls are found in
            replies all the same, and are shown as they were sampled where the template shows none.

    Raises:
        ValueError: an argument out of range; an agent that cannot be run, see `agents.agent`.
        ImportError: "ray" without the extra of that name.
    """

    def __init__(
        self,
        agent: str | list[str] | Callable[[Prompt], Any],
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        override_sampling: bool = False,
        budget: Budget | None = None,
        parser: Callable[[str], list[ToolCall]] = hermes_calls,
        workers: int = 8,
        deadline_s: float | None = None,
        memory_mb: float | None = None,
        keep_environment: list[str] | None = None,
        template_options: dict[str, Any] | None = None,
        judged: Literal["answer", "transcript"] = "answer",
        host: str = "127.0.0.1",
        executor: Literal["processes", "ray"] | agents.Processes | RayExecutor = "processes",
        untrainable: Literal["refuse", "serve"] = "refuse",
        show_tools: bool = True,
        on_failure: Literal["drop"] | float = "drop",
    ) -> None:
        name = type(self).__name__
        checks.at_least(1, {f"{name}.workers": workers})
        checks.deadline({f"{name}.deadline_s": deadline_s})
        checks.one_of(f"{name}.untrainable", untrainable, ("refuse", "serve"))
        checks.one_of(f"{name}.judged", judged, ("answer", "transcript"))
        checks.positive({f"{name}.memory_mb": memory_mb})
        is_score = isinstance(on_failure, int | float) and not isinstance(on_failure, bool)
        if on_failure != "drop" and not (is_score and abs(float(on_failure)) <= LARGEST_REWARD):
            raise ValueError(
                f"{name}.on_failure: {on_failure!r}, must be 'drop' or a score of at most {LARGEST_REWARD:g}"
            )
        if isinstance(executor, str):
            checks.one_of(f"{name}.executor", executor, ("processes", "ray"))
            executor = RayExecutor() if executor == "ray" else agents.Processes()
        self._executor = executor if isinstance(executor, RayExecutor) else None
        ReplyOptions(name, max_new_tokens, temperature)  # checks both
        self.max_new_tokens = max_new_tokens
        self._sampling = Sampling(max_new_tokens, temperature, override_sampling, untrainable)
        self._budget = budget or Budget()
        self._show_tools = show_tools
        self._parser = parser
        self._template_options = template_options
        self._chat: Chat | None = None
        self._agent = agent
        try:
            # Of training, and of validation: agents of the first wait, each with its worker, until the second are done.
            given = (agent, workers, memory_mb, keep_environment, executor)
            self._agents = [agents.agent(*given, held_out=held_out) for held_out in (False, True)]
        except ValueError as error:
            raise ValueError(f"{name}.agent: {error}") from error
        self._deadline_s = deadline_s
        self._judged = judged
        self.on_failure = on_failure
        self._failures = 0  # that were scored
        self._host = host
        self._outputs: _Outputs | None = None
        self._told: set[str] = set()  # of `_OF_CALLS`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[Gateway] | None = None
        self._serving: asyncio.Task[None] | None = None  # kept: an event loop holds its tasks weakly

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tries the chat template, the host and a command, and joins the executor. Raises ValueError: one of them does
        not do."""
        self._chat = Chat(tokenizer, options=self._template_options)
        if isinstance(self._parser, ResponseTemplate):
            self._parser.prepare(tokenizer)
        try:
            check_host(self._host)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}.host: {error}; give the one at which agents reach it") from error
        if self._executor is not None:
            self._executor.open(self._host)
            return  # whose machines have programs of their own
        try:
            self._agents[0].check()
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}.agent: {error}") from error

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The task as a user's message; what the agent sends is its own."""
        return tuple(self._template().prompt(prompt.conversation()))

    def log_to(self, directory: Path) -> None:
        """Keeps there what agents print: a file a process, and one for each of the first hundred agents that failed or
        were ended, and of the latest hundred."""
        self._outputs = _Outputs(directory)
        self._agents[0].log_to(directory / "workers")
        self._agents[1].log_to(directory / "held_out_workers")

    def close(self) -> None:
        """Ends the agents' processes."""
        for one in self._agents:
            one.stop()
        if self._executor is not None:
            self._executor.close()

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        # An agent that was lost has said something, and posted rewards maybe. One that began again in the same session
        # would add a second conversation to that, and be trained and scored for both. So each attempt has a session of
        # its own, and a machine that was only cut off speaks to one that nobody listens to any more.
        lost = 0
        while True:
            try:
                return await self._attempt(engine, prompt, lost)
            except Lost as error:
                if self._executor is None or lost >= self._executor.max_retries:
                    raise CallFailed(f"the agent {error}; {lost + 1} times (executor.max_retries)") from error
                lost += 1
                _log.warning("prompt '%s': the agent %s; its episode is played again (%d)", prompt.id, error, lost)

    async def _attempt(self, engine: EpisodeEngine, prompt: Prompt, lost: int) -> list[Trajectory]:
        gateway = await self._gateway()
        about = (self._sampling, self._budget, self._parser)
        session = Session(engine, self._template(), *about, show_tools=self._show_tools)
        if lost:
            session.counts["lost_attempts"] = lost
        door = agents.Door(gateway.admit(session), session.key, session.ended, lambda: engine.held_s)
        output = None if self._outputs is None else self._outputs.directory / f"{session.id}.log"
        failed, nobody = "", _NOBODY.format(finds=self._agents[0].finds)
        try:
            with engine.waiting("agent", prompt.id):
                result = await self._agents[engine.is_held_out].run(door, prompt, self._deadline_s, output)
        except (CallFailed, DeadlinePassed) as error:
            _check(session)
            if isinstance(error, Lost):
                raise
            if not session.exhausted:
                said, printed = _words(error), _printed(output, str(error).startswith("raised "))
                away = isinstance(error, DeadlinePassed) or _ELSEWHERE.search(said + printed)
                lonely = away and not session.asked and not said.startswith(_NEVER_BEGAN)
                why = f"; {nobody}" if lonely else _given_up(session, said + printed)
                if why or not _may_be_scored(error, session, printed):
                    raise CallFailed(f"the agent {said}{why}{printed}") from error
                if self.on_failure == "drop":
                    raise CallFailed(f"the agent {said}{printed}{_OF_THE_MODEL}") from error
                failed = said
                self._tell(prompt, f"the agent {said}{printed}")
            result = None
        except asyncio.CancelledError:  # the episode's deadline, or the end of the run
            _log.info("prompt '%s': the agent was ended%s", prompt.id, _printed(output))
            raise
        finally:
            if self._outputs is not None and output is not None:
                self._outputs.keep(output)
            gateway.dismiss(session)
            await session.end()  # a service may have calls under way, of which its answer and the reward know nothing
        _check(session)
        for count, words in _OF_CALLS.items():
            if session.counts[count] and count not in self._told:
                self._told.add(count)
                words = words.format(most=self.max_new_tokens)
                _log.warning("calls of the agent %s; %s in the samples' metadata counts them", words, count)
        if not session.transcript.calls and session.refused:  # programs swallow that, and end with code 0
            raise CallFailed(f"no call of the agent was answered; the last was refused: {session.refused}")
        if not session.transcript.calls:
            raise CallFailed(
                f"the agent asked for no reply; it must call the API by {self._agents[0].finds}, and keep no replies of"
                " other episodes in a cache" + (f" ({nobody})" if not session.asked else "")
            )
        if session.untrained == len(session.transcript.calls):
            raise CallFailed(
                f"none of the agent's {session.untrained} replies can be trained on: each call asked for top_p,"
                " temperature 0 or their like, which override_sampling passes over"
            )
        text = session.text()
        if isinstance(result, str) or (result is not None and engine.has_reward):  # which judges numbers as text
            text = str(result)
        if failed:
            reward = engine.settle(float(self.on_failure), failed)
        else:
            reward = await self._score(engine, prompt, session, result, text)
        found = session.trajectories(prompt, reward)
        for one in found:
            one.metadata |= {"completion": text, "answer": prompt.answer}
        return found

    def _tell(self, prompt: Prompt, why: str) -> None:
        """Of an episode that failed and is scored; as their number doubles."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            told = "prompt '%s': %s; scored %g (AgentWorkflow.on_failure), %d so far"
            _log.warning(told, prompt.id, why, self.on_failure, self._failures)

    async def _score(self, engine: EpisodeEngine, prompt: Prompt, session: Session, result: Any, text: str) -> float:
        posted = session.rewards.episode
        if engine.has_reward:
            if posted is not None:
                raise ValueError(
                    f"prompt '{prompt.id}': a reward was posted for the episode, and the data's reward is set; leave"
                    " one of them out (rewards of single calls may be posted with both)"
                )
            if self._judged == "answer":
                return await engine.score(prompt, text)
            calls = shown(session.exchanges)
            reward = await engine.score(prompt, calls)
            if engine.judgement is not None and engine.judgement.turns:
                trained = {one.id for one in session.transcript.calls if one.is_trained}
                for one, share in zip(calls, engine.judgement.turns, strict=True):
                    if one["id"] in trained:
                        session.rewards.add(one["id"], share)
                    else:  # it becomes no sequence, and the episode earned it all the same
                        reward += share
            return reward
        value = self._agents[0].number(result) if posted is None else posted
        if value is None:
            value = session.rewards.total  # 0.0 where calls alone have rewards
        if value is None:
            raise ValueError(
                f"prompt '{prompt.id}': the agent answered {str(result)[:100]!r} and posted no reward; answer with a"
                " number, POST one to <session>/reward, or set the data's reward"
            )
        return value

    async def _gateway(self) -> Gateway:
        """Listening on this event loop, until that ends."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._opened is None:
            self._loop, self._opened = loop, loop.create_future()
            self._serving = loop.create_task(_serve(self._opened, self._host))
        return await asyncio.shield(self._opened)

    def _template(self) -> Chat:
        assert self._chat is not None, "prepare comes first"
        return self._chat


class _Outputs:
    """What agents that failed have printed, a file each. Of thousands the first stay, which say how it began, and the
    latest.

    Args:
        directory: for the files. Those that a run which goes on finds there are its first.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        found: list[tuple[int, Path]] = []
        with suppress(OSError):
            found = sorted((path.stat().st_mtime_ns, path) for path in directory.glob("*.log"))
        self._first = min(len(found), _MOST_KEPT)
        self._latest = deque(path for _, path in found[self._first :])

    def keep(self, file: Path) -> None:
        """Of an episode that is over: there is none where nothing failed, or was printed."""
        if not file.exists():
            return
        if self._first < _MOST_KEPT:
            self._first += 1
            return
        self._latest.append(file)
        while len(self._latest) > _MOST_KEPT:
            with suppress(OSError):
                self._latest.popleft().unlink(missing_ok=True)


def _check(session: Session) -> None:
    """Raises what ended the session, if something did."""
    if isinstance(session.fault, PlaceholderSampled):  # counted apart
        raise session.fault
    if session.misfit:  # every episode would meet it, and train a model that was never told its tools
        raise Misfit(f"a call of the agent was refused: {session.misfit}")
    if session.fault is not None:
        raise GenerationError(f"the engine failed under the agent: {session.fault}") from session.fault


def _may_be_scored(error: Exception, session: Session, printed: str) -> bool:
    """Whether the model's replies may be why the agent failed: nothing else is known that could be. Of a command, which
    says so in what it `printed` alone."""
    trained = len(session.transcript.calls) > session.untrained
    if isinstance(error, DeadlinePassed) or session.refused or not trained:
        return False
    elsewhere = str(error).startswith("exited ") and _NO_REPLY_DID.search(printed)
    return bool(_BY_ITSELF.match(str(error)) and not elsewhere)


def _given_up(session: Session, said: str) -> str:
    """Of an agent that had no patience with its calls: how many they were, and the remedy; "" of others."""
    count = session.counts["abandoned_calls"]
    if not count or not _IMPATIENT.search(said):
        return ""
    return (
        f"; {count} of its calls were given up before their reply was there, which may take as long as a training step:"
        " give its client and its steps more time (timeout=600, LangGraph's step_timeout=None)"
    )


def _words(error: Exception) -> str:
    return f"was {error}" if isinstance(error, DeadlinePassed) else str(error)


def _printed(output: Path | None, raised: bool = False) -> str:
    """How what a failed agent printed ends, and where the rest is, and the traceback of what it `raised`; "" where
    there is nothing."""
    try:
        written = output.read_text("utf-8", "replace") if output is not None else ""
    except OSError:
        return ""
    before, trace, _ = written.partition(_TRACEBACK) if raised else (written, "", "")  # the error has it in short
    said = before.strip()
    if not said:
        return f" (traceback: {output})" if trace else ""
    where = "all of it, and the traceback" if trace else "all of it"
    return f"; it printed, at the end, {said[-_MOST_SHOWN:]!r} ({where}: {output})"


async def _serve(opened: asyncio.Future[Gateway], host: str) -> None:
    gateway = Gateway(host=host)
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
