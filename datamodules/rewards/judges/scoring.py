"""Scores of token sequences by a reward model: in a process of its own on this machine, or on an SGLang server.

Promises: what waits while a batch runs goes into the next one, up to a number of tokens, as one prefix tree, so that a
prompt that several replies share runs once; a batch that fails in the model is tried again one sequence at a time, and
only those to blame are refused; a process that dies, hangs or takes too much memory is ended and started again;
a server that cannot be reached is tried again until the deadline. Every wait has one.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.processes.calls import CallFailed, DeadlinePassed, ProcessCalls
from datamodules.rewards.judges.client import Spent
from datamodules.rewards.judges.model import JudgeError

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0


class Scorer:
    """A reward model in a process of its own: what `ProcessCalls` runs there.

    Args:
        path: directory of a transformers sequence classifier with one label.
        dtype, device: of its weights.
        threads: of torch's operations.
    """

    def __init__(self, path: str, dtype: str, device: str, threads: int) -> None:
        self._path, self._dtype, self._device, self._threads = path, dtype, device, threads
        self._engine: Any = None

    def prepare(self) -> None:
        """Loads the model. Raises ValueError: the directory holds no reward model."""
        import torch
        from transformers import AutoModelForSequenceClassification

        from app.tree import TreeEngine

        torch.set_num_threads(self._threads)
        path = Path(self._path).expanduser()
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=getattr(torch, self._dtype),
                num_labels=1,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"path: {path} holds no model that scores with one label: {error}") from error
        missing = [name for name in found["missing_keys"] if name.startswith("score.")]
        if missing or not hasattr(model, "score"):
            raise ValueError(
                f"path: {path} holds no trained head called score ({type(model).__name__}); train one with"
                " modules.RewardModule"
            )
        self._engine = TreeEngine(model.eval().to(self._device).requires_grad_(False), self_check=False)

    def __call__(self, name: str, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """The scores of each sequence (its tokens, and how many of them have been read at each score)."""
        import numpy as np
        import torch

        from app.tree import PrefixTree

        tokens, scored = [], []
        for ids, ends in sequences:
            # The engine's value of a position is read off the token before it: one more token, which never runs.
            tokens.append(np.array([*ids, ids[-1]], np.int64))
            mask = np.zeros(len(ids) + 1, bool)
            mask[list(ends)] = True
            scored.append(mask)
        with torch.no_grad():
            out = self._engine.forward(PrefixTree.build(tokens, scored=scored), ("values",))
        return [values[list(ends)].double().tolist() for values, (_, ends) in zip(out.values, sequences, strict=True)]


@dataclass
class _Waiting:
    tokens: Sequence[int]
    ends: Sequence[int]
    future: asyncio.Future[list[float]]


class LocalScores:
    """Scores from a `Scorer`, in batches. `open` before asking.

    Args:
        scorer: what runs there.
        batch_tokens: most tokens of a batch, before what is shared; a longer sequence is a batch of its own.
        deadline_s: seconds a batch may take.
        memory_mb: most memory of the process; see `RewardOptions`.

    Attributes:
        spent: `calls` are sequences.
    """

    exhausted = ""

    def __init__(self, scorer: Scorer, batch_tokens: int, deadline_s: float, memory_mb: float | None) -> None:
        self._process = ProcessCalls(pickle.dumps(scorer), 1, memory_mb)
        self._most, self._deadline_s = batch_tokens, deadline_s
        self._waiting: list[_Waiting] = []
        self._server: asyncio.Task[None] | None = None
        self.spent = Spent()
        self.batches = 0

    def open(self) -> None:
        """Joins the running event loop. The process starts with the first batch."""
        self._arrived = asyncio.Event()
        self._server = asyncio.create_task(self._serve())

    def close(self) -> None:
        """Ends the process. Idempotent."""
        if self._server is not None and not self._server.get_loop().is_closed():
            self._server.cancel()
        self._server = None
        self._process.stop()
        while self._waiting:
            one = self._waiting.pop()
            if not one.future.done() and not one.future.get_loop().is_closed():
                one.future.set_exception(JudgeError("was closed before it had scored this"))

    async def scores(self, tokens: Sequence[int], ends: Sequence[int]) -> list[float]:
        """The score at each of `ends`, numbers of tokens read, ascending. Raises JudgeError: there is none."""
        one = _Waiting(tokens, ends, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._arrived.set()
        return await one.future

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and (not batch or size + len(self._waiting[0].tokens) <= self._most):
                one = self._waiting.pop(0)
                if not one.future.done():  # its group was given up meanwhile
                    batch.append(one)
                    size += len(one.tokens)
            if not self._waiting:
                self._arrived.clear()
            if batch:
                await self._scored(batch)

    async def _scored(self, batch: list[_Waiting]) -> None:
        """All of them are answered or refused in the end."""
        now = asyncio.get_running_loop().time
        began = now()
        self.batches += 1
        try:
            job = [(list(one.tokens), list(one.ends)) for one in batch]
            found = await self._process.call("score", (job,), {}, self._deadline_s)
        except CallFailed as error:
            if len(batch) > 1:  # one of them is to blame
                self.spent.retries += len(batch)
                for one in batch:
                    await self._scored([one])
                return
            self._refuse(batch, JudgeError(f"could not score {len(batch[0].tokens)} tokens: {error}"))
        except DeadlinePassed:
            why = f"did not score {len(batch)} sequences within {self._deadline_s:g} s (RewardModel.deadline_s)"
            self._refuse(batch, JudgeError(f"{why}; raise it, or lower RewardModel.batch_tokens"))
        except asyncio.CancelledError:
            self._refuse(batch, JudgeError("was closed before it had scored this"))
            raise
        except Exception as error:  # a fault of ours: nobody may wait in vain
            self._refuse(batch, JudgeError(f"failed: {type(error).__name__}: {error}"))
        else:
            self.spent.calls += len(batch)
            self.spent.input_tokens += sum(len(one.tokens) for one in batch)
            self.spent.seconds += now() - began
            for one, scores in zip(batch, found, strict=True):
                if not one.future.done():
                    one.future.set_result([float(score) for score in scores])

    def _refuse(self, batch: list[_Waiting], error: JudgeError) -> None:
        for one in batch:
            if not one.future.done():
                self.spent.refused += 1
                one.future.set_exception(error)


class ServerScores:
    """Scores from an SGLang server that serves the model with `--is-embedding`: POST /classify with token ids, one
    request a score (its radix cache shares the prefixes). `open` before asking.

    Args:
        url: "http://host:port".
        key: sent as a bearer token; None for servers without one.
        deadline_s: seconds a score may take, all attempts and the waits between them included.
        max_concurrent: requests in flight.

    Raises:
        ValueError: the url is none.
        ImportError: the package aiohttp is missing.
    """

    exhausted = ""

    def __init__(self, url: str, key: str | None, deadline_s: float, max_concurrent: int) -> None:
        try:
            from datamodules.inference.sglang import client
        except ImportError as error:
            raise ImportError("RewardModel.url needs aiohttp; install it with: pip install -e '.[sglang]'") from error
        self._lost, self._refused = client.ServerLost, client.ServerRefused
        self._made = partial(client.ServerClient, url, key)
        self._client = self._made()  # refuses a url that is none
        self._keeper: asyncio.Task[None] | None = None
        self._deadline_s, self._most = deadline_s, max_concurrent
        self.spent = Spent()

    def open(self) -> None:
        """Joins the running event loop."""
        self._client = self._made()  # a session belongs to one loop, and each start makes another
        self._keeper = asyncio.create_task(self._kept())
        self._slots = asyncio.Semaphore(self._most)

    def close(self) -> None:
        """Closes the session, which ends with the event loop otherwise. Idempotent; after the loop ended, or in it."""
        if self._keeper is not None and not self._keeper.get_loop().is_closed():
            self._keeper.cancel()
        self._keeper = None

    async def _kept(self) -> None:
        client = self._client
        try:
            await asyncio.Event().wait()
        finally:  # by close(), or at the end of the loop
            await client.close()

    async def scores(self, tokens: Sequence[int], ends: Sequence[int]) -> list[float]:
        """As `LocalScores.scores`."""
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._score(list(tokens[:end]))) for end in ends]
        return [one.result() for one in asked]

    async def _score(self, tokens: list[int]) -> float:
        async with self._slots:
            try:
                return await self._asked(tokens)
            except JudgeError:
                self.spent.refused += 1
                raise

    async def _asked(self, tokens: list[int]) -> float:
        now = asyncio.get_running_loop().time
        ends, wait, again = now() + self._deadline_s, _FIRST_WAIT_S, False
        while True:
            if self._keeper is None:
                raise JudgeError("was closed before it had scored this")
            self.spent.calls += 1
            self.spent.retries += again
            began = now()
            try:
                answer = await self._client.post("/classify", {"input_ids": tokens}, max(0.01, ends - now()))
            except self._refused as error:
                if error.status < 500 and error.status != 429:
                    raise JudgeError(
                        f"refuses {len(tokens)} tokens: {error}; serve it with --is-embedding, see RewardModel.url"
                    ) from error
                why: Exception = error
            except self._lost as error:
                why = error
            else:
                self.spent.input_tokens += len(tokens)
                return _score_in(answer)
            finally:  # calls count those without an answer, too
                self.spent.seconds += now() - began
            if now() + wait >= ends:
                raise JudgeError(
                    f"gave no score within {self._deadline_s:g} s (RewardModel.deadline_s): {why}"
                ) from why
            await asyncio.sleep(wait)
            wait, again = min(_LONGEST_WAIT_S, 2 * wait), True


def _score_in(answer: dict[str, Any]) -> float:
    found = answer.get("embedding")
    if not isinstance(found, list) or len(found) != 1 or type(found[0]) not in (int, float):
        what = f"{len(found)} numbers" if isinstance(found, list) else type(found).__name__
        raise JudgeError(f"answers with {what} where one score belongs; serve a model with one label (num_labels: 1)")
    return float(found[0])
