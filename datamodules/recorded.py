"""RecordedDataModule: recorded agent conversations as training batches, with their groups and real rewards.

Promises: a batch holds whole groups (every recorded trial of a task, or the first `trials`); order depends on `seed`
alone and continues over epochs and resumes, there behind the last task that was dealt, also with another
`tasks_per_batch`; every pass has each task once; broken data is refused at start-up by file and line or trajectory.

Recordings hold no log-probabilities of the policy that sampled them. Their trained tokens therefore carry version -1
("no recorded sampler") and `behavior_logprobs` 0.0, and whoever trains on them takes its own log-probabilities at
the start of the batch as the old policy. Training this way is off-policy: a workload for tests and benchmarks,
not a recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import lightning as L
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import RolloutBatch, Trajectory
from datamodules.conversations.chat import ChatEncoder, Transcript, load_chat_tokenizer, load_system, load_transcripts
from datamodules.conversations.selection import best_and_worst, choose, first_trials, grouped
from datamodules.conversations.sessions import Session, load_sessions
from datamodules.conversations.tokens import QWEN3_THINK_IDS, Conversation, RecordedDataError, Workload, load_npz
from datamodules.files.data_files import resolve
from datamodules.pipeline import fingerprint
from datamodules.pipeline.loaders import Position, StepLoader

_log = logging.getLogger(__name__)
_Heard = TypeVar("_Heard", Session, Transcript)


class RecordedDataModule(L.LightningDataModule):
    """Groups of recorded conversations, `tasks_per_batch` of them a batch. docs/agents.md has the files' formats.

    Args:
        path: token arrays (`.npz`); conversations as text (`.jsonl`, `.jsonl.gz`; these need `tokenizer`), in OpenAI's
            form, too, which docs/agents.md ("Conversations that you have") has a script for making of others; or a
            directory of recorded batches, which `arborist gateway --record` and `RolloutDataModule(record=...)` write.
            (What a gateway records of a provider is text: join its files in one.) Of recorded batches the tokens and
            the episodes' rewards are used; their samplers' log-probabilities, versions and temperatures, and which call
            earned what, are not: `ReplayDataModule` trains from all of it.
            `${ARBORIST_DATA}` and other environment variables are expanded.
        workload: "turns", every generated turn is a sequence (its prompt, then the turn; loss on the turn alone);
            "whole", one sequence a conversation, loss on all generated tokens; "think", as "turns" with an empty
            think block before each turn that later turns' history drops.
        tasks_per_batch: groups a batch. The last batch of a pass over the tasks may hold fewer.
        trials: conversations a group: the first so many of each task. None takes all that are recorded.
        tasks: names of the tasks to use; None uses all.
        min_reward: leaves out conversations of a smaller reward, for supervised training on those that went well; they
            are counted in the log.
        pairs: of each task only the conversations of largest and smallest reward, for preference optimisation
            (objective `dpo`); tasks whose rewards are all equal are left out and counted in the log.
        unrewarded: what becomes of sessions and lines without a reward: "leave_out", or "keep" for imitation, where
            rewards mean nothing; None refuses them.
        tokenizer: directory of a tokenizer with a chat template, for text (with token arrays: only for "think",
            whose block is otherwise written in Qwen3's ids).
        system: `*_system.json` with the system prompt and tools that precede every conversation, for text.
        shuffle: deal the tasks of each pass in an order drawn from `seed` and the pass; else in the file's order.
        seed: see `shuffle`; None for that of `seed_everything` (in a script of your own: 0).
        batches_per_epoch: batches an epoch; None makes an epoch one pass over the tasks. The stream continues
            from epoch to epoch.

    In a batch `group_id` numbers the (task, model) pairs of the file, `episode_id` its conversations, `turn_index`
    the turns; `prompt_id` is the task's name and `metadata` holds trial, model and source.

    Raises (in `setup`):
        DataFileError: a file or environment variable that is not there; RecordedDataError: data or options that
        cannot be used, naming file and line, or key.
    """

    called_elsewhere: ClassVar = {"batch_size": "tasks_per_batch", "group_size": "trials"}
    """Options by the name they have in other datamodules, for the command line's error."""

    def __init__(
        self,
        path: str,
        workload: Workload = "turns",
        tasks_per_batch: int = 1,
        trials: int | None = None,
        tasks: list[str | int] | None = None,
        tokenizer: str | None = None,
        system: str | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        batches_per_epoch: int | None = None,
        min_reward: float | None = None,
        pairs: bool = False,
        unrewarded: Literal["leave_out", "keep"] | None = None,
    ) -> None:
        super().__init__()
        counts = {"tasks_per_batch": tasks_per_batch, "trials": trials, "batches_per_epoch": batches_per_epoch}
        checks.at_least(1, counts)
        if not path:
            raise ValueError("path: it is empty; name a file of recorded conversations")
        if unrewarded is not None:
            checks.one_of("unrewarded", unrewarded, ("leave_out", "keep"))
        for key in ("pairs",) * pairs + ("min_reward",) * (min_reward is not None):
            if unrewarded == "keep":
                raise ValueError(
                    f"unrewarded: keep, but {key} goes by rewards, and those sessions have none; set it to leave_out"
                )
        if pairs:
            checks.no_effect("with pairs", {"trials": trials})
        text = path.endswith((".jsonl", ".jsonl.gz"))
        arrays = path.endswith(".npz")
        if form := next((end for end in (".parquet", ".json", ".csv") if path.endswith(end)), None):
            raise ValueError(
                f"path: '{path}' is no JSONL; make it of that: datasets.load_dataset('{form[1:]}',"
                f" data_files='{path}', split='train').to_json('mine.jsonl')"
            )
        if text and tokenizer is None:
            raise ValueError(f"tokenizer: '{path}' holds text; give the directory of a tokenizer with a chat template")
        if not (text or arrays):
            if Path(path).is_file():
                raise ValueError(
                    f"path: '{path}' is neither conversations (.jsonl, .jsonl.gz, .npz) nor a directory of recorded"
                    " batches; name one of these"
                )
            checks.no_effect(f"on the recorded batches of '{path}'", {"tokenizer": tokenizer, "system": system})
            if workload != "turns":
                raise ValueError(f"workload: {workload}, but '{path}' holds sequences already; leave it at turns")
        if arrays:
            unused = None if workload == "think" else tokenizer
            checks.no_effect(f"on the token arrays of '{path}'", {"tokenizer": unused, "system": system})
        self.path, self.workload, self.tokenizer_spec, self.system = path, workload, tokenizer, system
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.tasks_per_batch, self.trials, self.tasks = tasks_per_batch, trials, tasks
        self.shuffle, self.seed, self.min_reward = shuffle, seed or 0, min_reward
        self.pairs, self.unrewarded = pairs, unrewarded
        self.episodes_per_group = ("trials", 1) if trials == 1 else None  # a group may have fewer than `trials`
        self._batches_per_epoch = batches_per_epoch
        self._think_ids: tuple[int, ...] = QWEN3_THINK_IDS
        self._groups: list[list[Conversation | Session]] = []
        self._position = Position(self._end)
        chosen = {"workload": workload, "tasks_per_batch": tasks_per_batch, "trials": trials, "tasks": tasks}
        dealt = {
            "min_reward": min_reward,
            "shuffle": shuffle,
            "seed": self.seed,
            "pairs": pairs,
            "unrewarded": unrewarded,
        }
        self._made_with = {key: str(value) for key, value in (chosen | dealt | {"system": None}).items()}

    def setup(self, stage: str | None = None) -> None:
        """Reads and checks the file (once); every rank does, since all of them need the number of batches."""
        if stage not in (None, "fit"):
            verb = getattr(stage, "value", stage)  # Lightning passes an enumeration
            raise ValueError(f"data: recorded conversations can only be trained on; there is nothing to {verb} with")
        if self._groups:
            return
        conversations = self._good(self._load())
        if self.path.endswith((".npz", ".jsonl", ".jsonl.gz")):
            self._made_with["path"] = fingerprint.of_file(resolve(self.path, "data.path"))
        else:
            self._made_with["path"] = _of_sessions(conversations)
        if self.system is not None:
            self._made_with["system"] = fingerprint.of_file(resolve(self.system, "data.system"))
        groups = choose(grouped(conversations), self.tasks, self.path)
        self._groups = [first_trials(group, self.trials) for group in groups.values()]
        if self.pairs:
            self._groups = self._preferences(self._groups)
        if self.tasks_per_batch > len(self._groups):
            raise RecordedDataError(
                f"tasks_per_batch: {self.tasks_per_batch}, but {len(self._groups)} tasks are chosen from {self.path}"
            )

    @property
    def num_tasks(self) -> int:
        """Groups to draw from."""
        return len(self._groups)

    @property
    def batches_per_pass(self) -> int:
        """Batches in which every chosen task occurs once."""
        return -(-self.num_tasks // self.tasks_per_batch)

    @property
    def batches_per_epoch(self) -> int:
        return self._batches_per_epoch or self.batches_per_pass

    def batch(self, position: int) -> RolloutBatch:
        """Batch number `position` (from 0) of the endless stream: a function of the data, the options and `seed`."""
        first = self._begin(position, self.tasks_per_batch)
        return self._of(range(first, self._end(first)))

    def _begin(self, batch: int, size: int) -> int:
        """How many tasks are dealt before a batch, from 0, where `size` are in each but the last of a pass."""
        turn, slot = divmod(batch, -(-self.num_tasks // size))
        return turn * self.num_tasks + slot * size

    def _end(self, first: int) -> int:
        """And behind the batch that begins there: none goes on with the next pass."""
        return first + min(self.tasks_per_batch, self.num_tasks - first % self.num_tasks)

    def _of(self, dealt: range) -> RolloutBatch:
        order = np.arange(self.num_tasks)
        turn, first = divmod(dealt.start, self.num_tasks)
        if self.shuffle:
            order = np.random.default_rng([self.seed, turn]).permutation(self.num_tasks)
        chosen = order[first : first + len(dealt)].tolist()
        return RolloutBatch.from_trajectories(t for group in chosen for t in self._trajectories(group))

    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    @property
    def groups_per_batch(self) -> tuple[str, int]:
        """The option that says how many groups a batch holds, and its value."""
        return "tasks_per_batch", self.tasks_per_batch

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return self._position.is_under_way(version)

    def hand_out(self, version: int) -> RolloutBatch | None:
        """See `BatchStream`."""
        dealt = self._position.hand_out(version)
        return self._of(dealt) if self.trainer.is_global_zero else None

    def state_dict(self) -> dict[str, Any]:
        position = self._position.state_dict(self.trainer.lightning_module.policy_version)
        return {**position, fingerprint.KEY: dict(self._made_with)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Warns of another stream's settings (`pipeline/fingerprint.py`)."""
        fingerprint.compare(state, self._made_with, fingerprint.EXAMPLES)
        size = int(state.get(fingerprint.KEY, {}).get("tasks_per_batch", self.tasks_per_batch))
        self._position.load_state_dict(state, lambda number: self._begin(number, size))

    def _preferences(self, groups: list[list[Conversation | Session]]) -> list[list[Conversation | Session]]:
        pairs = [pair for pair in map(best_and_worst, groups) if pair]
        if not pairs:
            raise RecordedDataError(
                f"pairs: no task of {self.path} has two conversations of different rewards; record more, or leave it"
                " out"
            )
        if len(pairs) < len(groups):
            _log.info(
                "pairs: %d of %d tasks are left out, their rewards are equal", len(groups) - len(pairs), len(groups)
            )
        return pairs

    def _rewarded(self, sessions: list[_Heard]) -> list[_Heard]:
        without = [one for one in sessions if not one.is_rewarded]
        if not without or self.unrewarded == "keep":
            return sessions
        if self.unrewarded is None or len(without) == len(sessions):
            raise RecordedDataError(
                f"unrewarded: {len(without)} of {len(sessions)} sessions have no reward (the first:"
                f" {without[0].source}); set it to keep for imitation, or to leave_out where others have one"
            )
        _log.info("unrewarded: leaves out %d of %d sessions", len(without), len(sessions))
        return [one for one in sessions if one.is_rewarded]

    def _good(self, conversations: Sequence[Conversation | Session]) -> Sequence[Conversation | Session]:
        least = self.min_reward
        if least is None:
            return conversations
        # As recordings hold them: 0.9 of float32 is less than 0.9.
        good = [one for one in conversations if np.float32(one.reward) >= np.float32(least)]
        if not good:
            best = max(one.reward for one in conversations)
            raise RecordedDataError(f"min_reward: {least:g}, but the best conversation of {self.path} has {best:g}")
        _log.info(
            "min_reward: %g leaves out %d of %d conversations",
            least,
            len(conversations) - len(good),
            len(conversations),
        )
        return good

    def _load(self) -> Sequence[Conversation | Session]:
        if not self.path.endswith((".npz", ".jsonl", ".jsonl.gz")):
            _log.info("data.path: of recorded batches only tokens and rewards are used; ReplayDataModule uses it all")
            return self._rewarded(load_sessions(resolve(self.path, "data.path", "directory")))
        file = resolve(self.path, "data.path")
        encoder = None
        if self.tokenizer_spec is not None:
            self.tokenizer = load_chat_tokenizer(self.tokenizer_spec, "data.tokenizer")
            self._made_with |= fingerprint.of_tokenizer(self.tokenizer)
            system = None if self.system is None else load_system(resolve(self.system, "data.system"))
            encoder = ChatEncoder(self.tokenizer, system)
            self._think_ids = tuple(encoder.think_ids())
        if file.suffix == ".npz":
            return load_npz(file)
        assert encoder is not None  # the constructor refuses text without a tokenizer
        return [encoder.encode(one) for one in self._rewarded(load_transcripts(file))]

    def _trajectories(self, group: int) -> Iterator[Trajectory]:
        first_episode = sum(len(g) for g in self._groups[:group])
        for number, conversation in enumerate(self._groups[group]):
            metadata: dict[str, Any] = {
                "trial": conversation.trial,
                "model": conversation.model,
                "source": conversation.source,
            }
            seen = conversation.seen if isinstance(conversation, Session) else None
            for turn, (tokens, mask) in enumerate(conversation.sequences(self.workload, self._think_ids)):
                images, pictures = seen[turn] if seen else (None, ())
                yield Trajectory(
                    tokens=torch.from_numpy(tokens.astype(np.int64)),
                    loss_mask=torch.from_numpy(mask),
                    behavior_logprobs=torch.zeros(len(tokens), dtype=torch.float32),
                    versions=torch.full((len(tokens),), -1),
                    reward=conversation.reward,
                    group_id=group,
                    episode_id=first_episode + number,
                    turn_index=turn,
                    prompt_id=conversation.task,
                    metadata=metadata,
                    images=images,
                    pictures=pictures,
                )


def _of_sessions(sessions: Sequence[Conversation | Session]) -> str:
    """Number (a directory may have grown) and a hash of the first, whatever the directory's name."""
    first = [[one.task, one.reward, [row.tolist() for row, _ in one.sequences("turns")]] for one in sessions[:16]]
    return f"{len(sessions)} sessions, {fingerprint.of_values(first)}"
