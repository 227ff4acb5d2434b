"""`RolloutDataModule`: prompts, workflow, reward and inference engine as the training data of a Lightning `fit`.

Promises: its arguments are its whole configuration; nothing starts before `start` (called by the WeightSync callback,
on global rank 0 only); batches hold `batch_size` whole groups; the stream goes on over epochs, validations and
restarts; everything it started ends with `teardown`, also after an error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from app import checks
from app.batch import RolloutBatch
from app.tree import Routers
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.files.recording import RolloutRecorder, versions
from datamodules.filters import GroupFilter
from datamodules.groups import Group, to_batch
from datamodules.inference.export import WeightParts
from datamodules.inference.protocol import InferenceEngine, ServerEngine
from datamodules.pipeline import fingerprint
from datamodules.pipeline.diagnosis import everything
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.limits import MOST_EPISODES, Limits
from datamodules.pipeline.loaders import EvalLoader, Played, PredictLoader, StepLoader
from datamodules.pipeline.player import EpisodePlayer
from datamodules.pipeline.producer import Producer
from datamodules.pipeline.stream import to_play_again
from datamodules.pipeline.validation import Validation, ValSet, with_answers
from datamodules.pipeline.watchdog import Stall, Watchdog
from datamodules.prompts.base import Prompt, PromptSource, prompt_source
from datamodules.prompts.dealer import PromptDealer
from datamodules.prompts.tokenizers import load_tokenizer, texts_of
from datamodules.rewards.judges.base import Judge
from datamodules.rewards.judges.pool import JudgePool, reward_pool
from datamodules.rewards.options import RewardOptions
from datamodules.workflows.base import Workflow
from datamodules.workflows.turn_ends import TurnEnds

_log = logging.getLogger(__name__)


class RolloutDataModule(L.LightningDataModule):
    """Rolls out groups of episodes, asynchronously, and hands them to the trainer in batches.

    Args:
        prompts: source of training prompts (a `PromptSource`).
        workflow: plays an episode: any class with `async def run(engine, prompt) -> list[Trajectory]` and
            `max_new_tokens`.
        engine: an `InferenceEngine`.
        tokenizer: "char:<alphabet>", "train:<size>" or a directory (see `datamodules.prompts.tokenizers`).
        reward: `(prompt, completion) -> float`, as the import path of a function, or class_path and init_args of a
            callable class; runs in worker processes. Or a judge (`datamodules.rewards.judges`). None when the workflow
            sets rewards itself.
        reward_options: worker processes, deadline, retries, cache, memory limit and score of failed rewards.
        validation: held-out prompts, how they are sampled, and when they count as solved.
        batch_size: groups a batch, over all ranks.
        group_size: episodes of each prompt (advantages from group statistics need at least 2).
        max_staleness: most policy versions between a group's admission and its training; 0 is synchronous, and
            reproducible under a seed: to the last bit with workflows of one turn, if `limits.max_concurrent` is at
            least `batch_size` and no group is filtered or fails. Otherwise who is computed beside whom depends on when
            rewards arrive: the same draws, up to float rounding, until a rounding flips a token.
        over_sampling: prompts started for each one a batch needs, at least 1.0. With 1.5, half a batch more than is
            needed is played; the first to finish are taken, and as soon as enough are finished the others are cancelled
            and their prompts played again, before any new ones (counted as `requeued`); those given up four times, once
            there is a batch of them, to the end. Batches are ready sooner, at a price: prompts with short episodes come
            first and long ones late, and runs are not reproducible.
        filter: decides which finished groups are worth training on (dynamic sampling, `datamodules.filters`); others
            are dropped, counted and replaced.
        batches_per_epoch: rollout batches an epoch. The stream goes on from epoch to epoch.
        limits: deadlines, how often to fail before the run stops, and how much is played at once.
        stall: when rollouts count as stalled, and what the watchdog does then.
        record: directory that every batch is written to, for `ReplayDataModule`; relative to the run directory. A run
            that goes on from a checkpoint sets those after it aside, see `RolloutRecorder.begin`.
        seed: of all sampling, but not of what a batch is of (see `max_staleness`); None for `seed_everything`'s, or 0.

    Raises:
        ValueError: an argument out of range or without effect.
    """

    renamed_options: ClassVar = {
        "reward_workers": "reward_options.workers",
        "reward_deadline_s": "reward_options.deadline_s",
        "val_prompts": "validation.prompts",
        "val_samples": "validation.samples",
        "val_temperature": "validation.temperature",
        "val_batch_size": "validation.batch_size",
        "val_options": "validation",
        "episode_deadline_s": "limits.episode_deadline_s",
        "collect_deadline_s": "limits.collect_deadline_s",
        "max_failures": "limits.max_failures",
        "max_filtered": "limits.max_filtered",
        "max_concurrent": "limits.max_concurrent",
        "long_prompts": "limits.long_prompts",
        "stall_after_s": "stall.after_s",
        "on_stall": "stall.action",
        "max_requeues": "stall.max_requeues",
    }
    """Options by the name they had, which the command line's error says."""

    def __init__(
        self,
        prompts: PromptSource,
        workflow: Workflow,
        engine: InferenceEngine,
        tokenizer: str,
        reward: Judge | Callable[[Prompt, str], float] | None = None,
        reward_options: RewardOptions = RewardOptions(),
        validation: Validation = Validation(),
        batch_size: int = 16,
        group_size: int = 8,
        max_staleness: int = 1,
        over_sampling: float = 1.0,
        filter: GroupFilter | None = None,
        batches_per_epoch: int = 100,
        limits: Limits = Limits(),
        stall: Stall = Stall(),
        record: str | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        checks.at_least(1, {"batch_size": batch_size, "group_size": group_size, "batches_per_epoch": batches_per_epoch})
        checks.at_most(MOST_EPISODES, {"batch_size": batch_size, "group_size": group_size})
        checks.at_most(MOST_EPISODES, {"batch_size x group_size": batch_size * group_size})
        checks.at_most(1000, {"max_staleness": max_staleness, "over_sampling": over_sampling})
        if filter is None:
            unused = {"limits.max_filtered": limits.max_filtered, "limits.rest": limits.rest}
            checks.no_effect("without filter", unused, "remove it or set filter")
        if reward is None and reward_options != RewardOptions():
            raise ValueError("reward_options has no effect without reward; remove it or set reward")
        if stall.action == "restart_server" and not (isinstance(engine, ServerEngine) and engine.owns_servers):
            raise ValueError(
                f"stall.action: restart_server needs servers that the engine started; engine: {type(engine).__name__}"
                " has none of its own: set stall.action to warn, requeue or stop, or use SGLangEngine with launch"
            )
        if isinstance(reward, Judge) and reward.is_relative:
            unverified = reward.verifier is None and validation.sets() != []
            _check_comparison(type(reward).__name__, group_size, unverified, getattr(workflow, "on_failure", "drop"))
        stall.seconds(limits)  # refused here, where it would have no effect
        self.prompts = prompt_source(prompts, "prompts")
        self.workflow: Any = _checked_workflow(workflow)
        self.engine: InferenceEngine = _checked_engine(engine)
        self.tokenizer_spec = tokenizer
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.image_processor: ImageProcessor | None = None
        self.validation = validation
        self.val_sets = validation.sets()
        self.batch_size = batch_size
        self.group_size = group_size
        self.episodes_per_group = ("group_size", group_size)
        self.batches_per_epoch = batches_per_epoch
        self.gate = StalenessGate(batch_size, max_staleness, limits.max_concurrent, over_sampling)
        self.limits = limits
        self.stall = stall
        self._pool = None if reward is None else reward_pool(reward, reward_options)
        self.filter = filter
        self._seed = seed or 0
        numbers: dict[str, float] = {"group_size": group_size, "batch_size": batch_size}
        numbers |= {"max_staleness": max_staleness, "seed": self._seed, "over_sampling": over_sampling}
        self._made_with = {
            **fingerprint.of_object("workflow", workflow),
            **fingerprint.of_object("reward", reward),
            **fingerprint.of_object("filter", filter),
            **fingerprint.of_play(numbers, limits, None if reward is None else reward_options, validation),
        }
        self._producer: Producer | None = None
        self._watchdog: Watchdog | None = None
        self._record = record
        self._recorder: RolloutRecorder | None = None
        self._ends: tuple[int, ...] = ()
        self._val_dealers: dict[str, PromptDealer] = {}
        self._started = False
        self._logs: Path | None = None
        self._stream: dict[str, Any] | None = None  # where the next start goes on
        self._handed_out_at: int | None = None  # the version that the last batch trains; on every rank

    # ---- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Loads the tokenizer, on every rank; one trained here is saved in the run directory."""
        trainer = self._trainer()
        directory = trainer.log_dir  # asked on every rank: Lightning broadcasts it
        self._logs = Path(directory or trainer.default_root_dir)
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.tokenizer_spec, texts_of(self.prompts))
            self.image_processor = ImageProcessor.beside(self.tokenizer_spec, self.tokenizer)
            if self.tokenizer_spec.startswith("train:") and trainer.is_global_zero and directory:
                self.tokenizer.save_pretrained(Path(directory) / "tokenizer")
            self._made_with |= fingerprint.of_tokenizer(self.tokenizer) | fingerprint.of_held_out(self.val_sets)
            self._made_with["prompts"] = fingerprint.of_prompts(self.prompts)
        if stage == "fit" and trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"trainer.accumulate_grad_batches: {trainer.accumulate_grad_batches}, but a rollout batch is one or"
                " more whole optimizer steps; leave it at 1 and raise data.batch_size instead"
            )
        if self._record is not None and stage in ("fit", "predict"):
            directory = Path(trainer.log_dir or trainer.default_root_dir)  # asked on every rank, as above
            self._recorder = RolloutRecorder(directory / self._record) if trainer.is_global_zero else None

    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    def val_dataloader(self) -> EvalLoader | list[EvalLoader]:
        """A loader a set of held-out prompts."""
        loaders = [EvalLoader(one, self.validation.batch_size, self.evaluate) for one in self.val_sets]
        return loaders[0] if len(loaders) == 1 else loaders

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> PredictLoader:
        """Training prompts, rolled out by these weights and not trained on: `batches_per_epoch` batches."""
        return PredictLoader(self.batches_per_epoch, self.collect, self.discard_batch)

    def state_dict(self) -> dict[str, Any]:
        """The stream: position, prompts in progress (to be played again), finished groups, the groups of a batch under
        way, counters; what a judge has used."""
        producer, spent = self._producer, {} if self._pool is None else self._pool.state_dict()
        state = dict(self._stream or {}) if producer is None else producer.state_dict(**self._in_training(producer))
        return {**state, **spent, fingerprint.KEY: dict(self._made_with)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes effect with the next `start`. Warns of another stream's settings (`pipeline/fingerprint.py`).

        Raises:
            RuntimeError: rollouts already run. ValueError: it was made with another tokenizer.
        """
        if self._producer is not None:
            raise RuntimeError("RolloutDataModule.load_state_dict: rollouts are running; load before start")
        fingerprint.compare(state_dict, self._made_with, fingerprint.ROLLOUTS, self.trainer)
        predicts = self.trainer is not None and self.trainer.state.fn == TrainerFn.PREDICTING
        if self._pool is not None and not predicts:
            self._pool.load_state_dict(state_dict)
        self._stream = to_play_again(state_dict) if predicts else dict(state_dict)
        self._handed_out_at = self._stream.get("version")

    def teardown(self, stage: str) -> None:
        """Ends producer, engine and reward workers. A later `start` goes on with the stream."""
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        self.close()

    # ---- called by WeightSync, on global rank 0

    def start(self, model: PreTrainedModel, version: int, parts: WeightParts | None = None) -> None:
        """Starts reward workers, engine and producer with these weights; does nothing where they run already.

        Training rollouts are admitted from the first training step on.

        Raises:
            ValueError: prompts, tokenizer and model do not fit together, or the reward cannot be loaded.
        """
        if self._started or not self._trainer().is_global_zero:
            return
        self._started = True
        try:
            self._launch(model, version, parts)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> None:
        """The engine serves `version` from now on."""
        self._running_producer().publish(version)

    def counters(self) -> dict[str, int]:
        """Where the groups of the stream are; see `StalenessGate.counters`."""
        return self.gate.counters()

    def tally(self) -> dict[str, float]:
        """What the groups were worth that finished since this was last asked, before filter and staleness; see
        `Tally.take`. And what a judge has used so far; see `JudgePool.spent`."""
        spent = {} if self._pool is None else self._pool.spent()
        return {} if self._producer is None else {**self._producer.stream.worth(), **spent}

    def diagnose(self) -> str:
        """For a run that hangs: what is pending where, and where every task waits. From any thread."""
        producer = self._producer
        return "nothing rolls out" if producer is None else everything(producer)

    def close(self) -> None:
        """Ends everything this datamodule started, keeping the stream for a later start. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        producer, self._producer = self._producer, None
        if producer is not None:
            self._stream = producer.state_dict(**self._in_training(producer))
            producer.close()
        if self._pool is not None:
            self._pool.close()
        if self._started and hasattr(self.workflow, "close"):
            self.workflow.close()
        if self._started:
            self.engine.close()
        self._started = False

    # ---- called by the loaders, on every rank

    @property
    def groups_per_batch(self) -> tuple[str, int]:
        """The option that says how many groups a batch holds, and its value."""
        return "batch_size", self.batch_size

    def is_under_way(self, version: int) -> bool:
        """See `BatchStream`."""
        return version == self._handed_out_at

    def hand_out(self, version: int) -> RolloutBatch | None:
        """See `BatchStream`; None, too, when the run is asked to end meanwhile. Raises as `collect`."""
        if not self._trainer().is_global_zero:
            self._handed_out_at = version
            return None
        stream = self._running_producer().stream
        if not self.is_under_way(version):
            stream.release()
            self._handed_out_at = version  # before they are taken: no interruption finds groups that are nobody's
        groups = stream.taken or self.collect()
        return to_batch(groups) if groups else None

    def collect(self) -> list[Group]:
        """The next batch's groups; empty when the run is asked to end, and on other ranks than 0. Raises TimeoutError
        and RuntimeError as `Producer.collect`."""
        if not self._trainer().is_global_zero:
            return []
        groups = self._running_producer().collect(self.batch_size, self.limits.collect_deadline_s)
        if groups and self._recorder is not None:
            self._recorder.write(self.gate.version, groups)
        return groups

    def discard_batch(self) -> None:
        """The batch collected last will not be trained on: it counts as a version of its own, so that there is room for
        the next one while the weights stay as they are."""
        self._running_producer().stream.release()
        self._running_producer().publish(self.gate.version + 1)
        self._running_producer().stream.renew()

    def evaluate(self, prompts: ValSet, first: int, last: int) -> Played:
        """The set's prompts `[first, last)`; none on other ranks than 0. Raises as `Producer.evaluate`."""
        if not self._trainer().is_global_zero:
            return [], 0
        producer, dealer = self._running_producer(), self._val_dealers[prompts.name]
        dealt = [prompt for prompt in map(dealer.deal, range(first, last)) if prompt is not None]
        groups = producer.evaluate(dealt, prompts.samples, self.validation.temperature, self.limits.collect_deadline_s)
        if prompts.samples > 1:
            assert self.tokenizer is not None
            groups = with_answers(groups, self.tokenizer, prompts.answer, self._ends)
        return groups, len(dealt)

    def _launch(self, model: PreTrainedModel, version: int, parts: WeightParts | None) -> None:
        assert self.tokenizer is not None, "start comes after setup"
        under_way = (self._stream or {}).get("version") == version
        if self._recorder is not None:
            # A batch under way was recorded when it was handed out. What is in a run's own directory is the run's, even
            # where it was killed before its first checkpoint and begins anew.
            goes_on = self._stream is not None or not Path(str(self._record)).is_absolute()
            self._recorder.begin(version + under_way, goes_on)
        if self._pool is not None:
            self._pool.start(self._logs and self._logs / "reward_workers")
        if self.image_processor is not None and hasattr(self.engine, "use_images"):
            self.engine.use_images(self.image_processor)
        self.engine.start(model, version, self._seed, *(() if parts is None else (parts,)))
        _note_experts(self.engine, model)
        if self.tokenizer.eos_token_id >= self.engine.vocab_size:
            raise ValueError(
                f"tokenizer: its end of sequence is token {self.tokenizer.eos_token_id}, outside the model's vocabulary"
                f" of {self.engine.vocab_size}; use the tokenizer that belongs to the model"
            )
        ends = TurnEnds.of(self.tokenizer, model, self.engine.vocab_size)
        # Seen without asking where replies end with more than the tokenizer's end of sequence.
        level = logging.WARNING if len(ends.ids) > 1 else logging.INFO
        _log.log(level, "%s", ends.line(self.tokenizer, getattr(self.workflow, "stop", ())))
        if self._logs is not None and hasattr(self.workflow, "log_to"):
            self.workflow.log_to(self._logs / "agents")
        if hasattr(self.workflow, "prepare"):
            self.workflow.prepare(self.tokenizer)
        dealer, *val_dealers = (
            PromptDealer(
                source,
                self.tokenizer,
                vocab_size=self.engine.vocab_size,
                max_context=self.engine.max_context,
                reply_tokens=self.workflow.max_new_tokens,
                encode=getattr(self.workflow, "encode", None),
                long_prompts=self.limits.long_prompts,
                image_processor=self.image_processor,
            )
            for source in (self.prompts, *(one.source for one in self.val_sets))
        )
        for one in (dealer, *val_dealers):
            one.check()
        self._val_dealers = {one.name: its for one, its in zip(self.val_sets, val_dealers)}
        self._ends = ends.ids
        if isinstance(self._pool, JudgePool):
            self._pool.join(self.engine, self.tokenizer, ends.ids)
        player = EpisodePlayer(
            self.workflow,
            self.engine,
            self.tokenizer,
            self._pool,
            self.limits.episode_deadline_s,
            ends,
            self.image_processor,
        )
        self._producer = Producer(
            player,
            dealer,
            self.gate,
            group_size=self.group_size,
            seed=self._seed,
            limits=self.limits,
            group_filter=self.filter,
            solved_at=self.validation.solved_at,
        )
        self._producer.start(version, self._stream)
        if self._recorder is not None and under_way and version not in versions(self._recorder.directory):
            self._recorder.write(version, self._producer.stream.taken)  # by a run in another directory
        self._watchdog = Watchdog(self.stall, self.limits, self._producer)
        self._watchdog.start()

    def _running_producer(self) -> Producer:
        if self._producer is None:
            raise ValueError(
                "RolloutDataModule: nothing rolls out; add callbacks.WeightSync to trainer.callbacks, which starts it"
            )
        return self._producer

    def _in_training(self, producer: Producer) -> dict[str, list[Group]]:
        """The groups of a batch whose last optimizer step is not done, as `Producer.state_dict` takes them."""
        module: Any = self._trainer().lightning_module
        if not producer.stream.taken or not self.is_under_way(module.policy_version):
            return {}
        return {"under_way" if module.steps_done else "in_training": producer.stream.taken}

    def _trainer(self) -> L.Trainer:
        """The trainer this datamodule was given to. Raises RuntimeError without one."""
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule: no trainer; hand it to trainer.fit or trainer.validate")
        return self.trainer


def _check_comparison(judge: str, group_size: int, unverified: bool, on_failure: Any) -> None:
    """Raises ValueError: nothing to compare, a held-out reply alone that nothing can be said about, or episodes that
    would have a score and no place, for which the others of their group would wait."""
    if on_failure != "drop":
        raise ValueError(
            f"workflow.on_failure: {on_failure}, but {judge} compares the episodes of a group, and has no score of a"
            " failed one; remove on_failure and have the agent catch what it raises, or use RubricJudge"
        )
    if group_size < 2:
        raise ValueError(f"group_size: {group_size}, but {judge} compares the episodes of a group; set at least 2")
    if unverified:
        raise ValueError(
            f"validation.prompts: {judge} compares the episodes of a group and has nothing to say of a held-out one;"
            f" give it a verifier, or leave validation out"
        )


def _checked_workflow(value: Any) -> Workflow:
    """`value`, if it has what a workflow needs; else ValueError."""
    if not hasattr(value, "run") or not hasattr(value, "max_new_tokens"):
        raise ValueError(f"workflow: {type(value).__name__} needs a method run and an attribute max_new_tokens")
    workflow: Workflow = value
    return workflow


def _checked_engine(value: Any) -> InferenceEngine:
    """`value`, if it has all methods of an engine; else ValueError names those it lacks."""
    # Looked up without running properties: an engine's may fail before its start.
    names = [name for name in vars(InferenceEngine) if not name.startswith("_")]
    missing = [name for name in names if inspect.getattr_static(value, name, None) is None]
    if missing:
        raise ValueError(f"engine: {type(value).__name__} is no InferenceEngine, it lacks {', '.join(missing)}")
    engine: InferenceEngine = value
    return engine


def _note_experts(engine: InferenceEngine, model: PreTrainedModel) -> None:
    """Says of a model of experts what the engine could record."""
    if getattr(engine, "record_experts", None) is not False:
        return
    with suppress(ValueError):  # there are none, or they cannot be replayed
        layers, chosen = Routers.of(model).shape
        _log.warning(
            "the model sends a token to %d experts in each of %d layers, by rounding now and then to others in the"
            " trainer than in the sampler (mismatch_kl); with record_experts: true of data.engine the trainer goes by"
            " the sampler's",
            chosen,
            layers,
        )
