"""Sessions that come up by their name, for agents that nobody trains yet, and what is recorded of them.

Promises: a name is one session, from its first request until it is ended, has been silent for `idle_s`, or the gateway
closes; then the calls that were answered are written, before whoever ended it is told. A session that lost its engine
is not written, and one in which nothing was answered neither; both are counted. What a killed process has not written
are the sessions under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from app import checks
from datamodules.conversations.chat_template import Chat
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.files.recording import AlreadyRecorded, RolloutRecorder, versions
from datamodules.groups import Group, label
from datamodules.inference.protocol import InferenceEngine
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.server import Gateway, same_key
from datamodules.workflows.gateway.sessions import Budget, Parser, Session
from datamodules.workflows.turn_ends import TurnEnds

_log = logging.getLogger(__name__)
_LONGEST_NAME = 200
_MOST_SESSIONS = 10_000
_LOOK_S = 1.0


class SessionRecorder:
    """Writes sessions as `RolloutRecorder` writes batches, a file each; the prompt of a session is a hash of its first
    request, so that sessions that began alike are samples of one task.

    Args:
        directory: where to; what it holds already stays, and the numbers go on. Several gateways may write there.
    """

    def __init__(self, directory: Path) -> None:
        self._recorder = RolloutRecorder(directory)
        self._number = self._free()

    def _free(self) -> int:
        """The number behind all that are there. It takes a listing of the directory."""
        return max(versions(self._recorder.directory), default=-1) + 1

    def write(self, session: Session) -> Path:
        """Raises RecordingError when the disk refuses it."""
        first = session.exchanges[0]
        begun = json.dumps([list(first.messages), first.tools], sort_keys=True)
        prompt = Prompt(id=hashlib.sha256(begun.encode()).hexdigest()[:12])
        total = session.rewards.total
        found = session.trajectories(prompt, 0.0 if total is None else total, recorded=True)
        for one in found:
            one.metadata |= {"session": session.id, "rewarded": total is not None}
        while True:
            number = self._number
            try:
                path = self._recorder.write(number, [Group(number, prompt.id, 0, label(found, number, 0, 1))])
            except AlreadyRecorded:  # by another gateway, since this one looked
                self._number = self._free()
            else:
                self._number = number + 1
                return path


def check_new(name: str, over: Container[str], count: int) -> None:
    """Raises RequestError where no session of that name can begin, beside `count` others and those that are over."""
    if name in over:
        raise RequestError("the session has ended; use another name", status=403, code="session_ended")
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise RequestError(f"session: its name must be text of at most {_LONGEST_NAME} characters", param="session")
    if count >= _MOST_SESSIONS:
        raise RequestError(f"there are {_MOST_SESSIONS} sessions; POST to /end of some", status=429)


class OpenSessions:
    """The sessions of a gateway that are opened by being named.

    Args:
        engine: started.
        tokenizer: the model's.
        key: what clients must show.
        sampling, budget, parser: of every session.
        ends: what ends a reply.
        record: None to record nothing.
        idle_s: seconds of silence after which a session is over.
        seed: of the sampling, with the session's name and the number of the call.
        image_processor: the model's; None for one that is shown no pictures.
        show_tools: of every session.

    Attributes:
        counts: sessions "written", "faulty" (the engine failed), "empty"; replies "untrainable" in those written.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: PreTrainedTokenizerBase,
        key: str,
        sampling: Sampling,
        budget: Budget,
        parser: Parser,
        ends: TurnEnds,
        record: SessionRecorder | None,
        idle_s: float,
        seed: int = 0,
        image_processor: ImageProcessor | None = None,
        show_tools: bool = True,
    ) -> None:
        checks.deadline({"idle_s": idle_s})
        self.counts: Counter[str] = Counter()
        self._engine, self._tokenizer, self._ends = engine, tokenizer, ends
        self._chat = Chat(tokenizer)
        self._key, self._seed = key, seed
        self._sampling, self._budget, self._parser = sampling, budget, parser
        self._record, self._image_processor = record, image_processor
        self._idle_s, self._show_tools = idle_s, show_tools
        self._open: dict[str, Session] = {}
        self._over: set[str] = set()
        self._writing = asyncio.Lock()

    def open(self, name: str, key: str) -> Session | None:
        """The session of that name; None for another key. Raises RequestError: one that is over, a name too long, or
        too many sessions."""
        if not same_key(key, self._key):
            return None
        check_new(name, self._over, len(self._open))
        engine = EpisodeEngine(
            self._engine,
            self._tokenizer,
            None,
            name=name,
            seed=f"{self._seed}/{name}",
            ends=self._ends,
            image_processor=self._image_processor,
        )
        self._open[name] = session = Session(
            engine, self._chat, self._sampling, self._budget, self._parser, name, self._key, self._show_tools
        )
        return session

    async def end(self, session: Session) -> None:
        """Writes it; no call is answered in it any more. Raises RecordingError when the disk refuses it."""
        await session.end()
        async with self._writing:
            if session.id in self._over:
                return
            if session.fault is not None or not session.exchanges:
                self.counts["empty" if session.fault is None else "faulty"] += 1
            elif self._record is not None:
                await asyncio.to_thread(self._record.write, session)
                self.counts["written"] += 1
                self.counts["untrainable"] += session.untrained
            self._over.add(session.id)
            self._open.pop(session.id, None)

    async def watch(self, gateway: Gateway) -> None:
        """Ends the sessions in which nothing is said any more; until it is cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_S, self._idle_s / 2))
            for session in [one for one in self._open.values() if self._is_silent(one)]:
                _log.info("session %s: silent for %g s, and over", session.id, self._idle_s)
                await self.end(session)
                gateway.dismiss(session)

    async def close(self, failed: Callable[[Session, Exception], None]) -> None:
        """Ends all of them; `failed` is told of each that could not be written."""
        for session in list(self._open.values()):
            try:
                await self.end(session)
            except Exception as error:
                failed(session, error)

    def _is_silent(self, session: Session) -> bool:
        return not session.repeats.running and time.monotonic() - session.touched > self._idle_s
