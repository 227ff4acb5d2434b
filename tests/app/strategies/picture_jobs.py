"""Tree passes and fits with pictures that a group of ranks runs together (importable, hence not in a test file)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.qwen3_vl import modeling_qwen3_vl

from app.batch import RolloutBatch, Trajectory
from app.pictures import Picture
from app.strategies import DTAStrategy
from app.strategies.shards import is_sharded, shard_models
from app.tree import SelfCheckError, TreeEngine, memory, tower_parameters
from app.tree.model.pictures import PicturePass
from callbacks import SavePretrained
from modules import ModelSource, PolicyModule
from tests.app.strategies.ranks.group_jobs import CountedGroup, mine, receive, take_sums
from tests.app.strategies.sums_jobs import Reads
from tests.app.tree.engine import families as text
from tests.app.tree.engine.pictures import families, vision
from tests.app.tree.engine.pictures.test_parity import FROZEN, build, exact_norm
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads
from tests.helpers.tiny_policy import Batches, Metrics, parameters, trainer

CLIP = 0.1
Layout = tuple[int, int, bool]
"""Ranks, ranks of a group, whether parameters are sharded."""


def freeze(model: vision.Vision, frozen: str) -> None:
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(not (frozen and FROZEN[frozen](name)))


@contextmanager
def exact() -> Iterator[None]:
    """Norms of Qwen3-VL do not round to float32 on their way."""
    with patch.object(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", exact_norm):
        yield


def run_pass(
    size: int,
    dtype: torch.dtype,
    texts: list[list[vision.Part]],
    plan: tuple[int, int],
    sharded: bool,
    frozen: str = "",
    again: bool = False,
    name: str = "Qwen3-VL",
) -> dict[str, Any]:
    """One rank's forward and backward; `again`: graphs of pictures have no room, and the tower runs once more."""
    with ExitStack() as inside:
        if dtype == torch.float64:
            inside.enter_context(exact())
        if again:
            inside.enter_context(patch.object(memory, "_TOWER_SHARE", 0.0))
        group, model = CountedGroup(size), vision.make(name, dtype)
        freeze(model, frozen)
        if sharded:
            shard_models(model.model, group, receive)
        sequences = model.sequences(texts)
        tree, loss = build(sequences), SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
        engine = TreeEngine(model.model, *plan, image_processor=model.processor, group=group, self_check=False)
        outputs = engine.forward(tree)
        total = engine.backward(tree, loss)
        return {
            "outputs": outputs.flat("logprobs"),
            "total": total,
            "grads": mine(take_grads(model.model)),
            "collectives": list(group.seen),
            "runs": engine.tower.runs,
        }


def tower_runs(size: int, sharded: bool) -> list[int]:
    """How often this rank's tower had run after each of two backward passes, and with it frozen after two more."""
    group, model = CountedGroup(size), vision.make("Qwen3-VL")
    if sharded:
        shard_models(model.model, group, receive)
    tree = build(model.sequences([[1, 2, letter, 5, 6] for letter in "ABCD"]))
    engine = TreeEngine(model.model, 7, 14, image_processor=model.processor, group=group, self_check=False)
    runs = []
    for frozen in (False, False, True, True):
        for parameter in tower_parameters(model.model):
            parameter.requires_grad_(not frozen)
        engine.backward(tree, lambda out, i: out.logprobs.sum())
        runs.append(engine.tower.runs)
    return runs


def run_cells(size: int, cells: list[tuple[str, str]], sharded: bool) -> None:
    """Cells of the support matrix's table with pictures (family, column), by an engine of which this rank is a part."""
    group, check = CountedGroup(size), families.check

    def engine_over(model: Any, *arguments: Any, **options: Any) -> TreeEngine:
        if sharded and not is_sharded(model):
            shard_models(model, group, receive)
        return TreeEngine(model, *arguments, group=group, **options)

    def check_against_whole(name: str, model: vision.Vision, dense: vision.Vision | None = None) -> None:
        whole = vision.Vision(copy.deepcopy(model.model), model.processor, model.pictures, model.tile)
        try:
            check(name, model, dense or whole)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error

    def within_after_sums(found: tuple[float, float], tolerances: tuple[float, float]) -> None:
        within(found, (tolerances[0], 2 * tolerances[1]))  # every gradient is a sum over ranks, rounded once more

    within = text.within
    with (
        patch.object(families, "TreeEngine", engine_over),
        patch.object(families, "check", check_against_whole),
        patch.object(text, "within", within_after_sums),
        patch.object(families, "take_grads", lambda model: take_sums(group, model)),
    ):
        for family, column in cells:
            families.COLUMNS[column](family)


def check_itself(size: int, sharded: bool) -> tuple[str, str]:
    """What the self-check of a right engine says, and of one whose last rank gives rows of the wrong picture."""
    group, said = CountedGroup(size), []
    taken = PicturePass.take

    def mistaken(self: PicturePass, *arguments: Any) -> Any:
        given, rows = taken(self, *arguments)
        if given and group.rank == group.size - 1:
            features = given["mm_encoder_outputs"]["image"].pooler_output
            features[0].data.mul_(1.01)
        return given, rows

    for take in (taken, mistaken):
        model = vision.make("Qwen3-VL")
        if sharded:
            shard_models(model.model, group, receive)
        engine = TreeEngine(model.model, image_processor=model.processor, group=group)
        tree = build(model.sequences([[1, 2, "A", 5, 6, 7, 8], [1, 2, "A", 5, 9, 10]]))
        with patch.object(PicturePass, "take", take):
            try:
                engine.backward(tree, lambda out, i: out.logprobs.sum())
                said.append("")
            except SelfCheckError as error:
                said.append(str(error))
    return said[0], said[1]


def shard_all(size: int) -> str:
    """What is said of a model whose tower its own trainer has cut up."""
    group, model = CountedGroup(size), vision.make("Qwen3-VL")
    fully_shard(model.model.model.visual, mesh=group.mesh)
    engine = TreeEngine(model.model, image_processor=model.processor, group=group, self_check=False)
    try:
        engine.forward(build(model.sequences([[1, "A", 2]])))
    except ValueError as error:
        return str(error)
    return ""


def pictured_batch(seed: int) -> RolloutBatch:
    """Two groups on a picture each, one of whose samples is shown another later, and one the first again; for the tiny
    Qwen3-VL of `tests.helpers.tiny_vision`, whose ids of text are bytes."""
    start, end, placeholder = 258, 259, 260
    random = np.random.default_rng(seed)
    shown = [
        Picture.of(random.integers(0, 256, (height, width, 3), np.uint8), height * width // 64)
        for height, width in ((16, 24), (16, 24), (24, 16))
    ]
    trajectories = []
    for number, turns in enumerate([(0,), (0,), (0, 2), (1,), (1, 1), (1, 2)]):
        tokens, images, trained = [7, 8], [-1, -1], [False, False]
        for picture in turns:
            rows = shown[picture].tokens
            reply = random.integers(20, 200, 3).tolist()
            tokens += [start, *[placeholder] * rows, end, 9, *reply]
            images += [-1, *[picture] * rows, *[-1] * 5]
            trained += [False] * (rows + 3) + [True] * 3
        column = torch.tensor(images)
        used = sorted(set(turns))
        table = torch.tensor([used.index(k) if k in used else -1 for k in range(len(shown))] + [-1])
        chosen = torch.tensor(trained)
        trajectories.append(
            Trajectory(
                tokens=torch.tensor(tokens),
                loss_mask=chosen,
                behavior_logprobs=torch.where(chosen, -4.0, 0.0),
                versions=torch.where(chosen, 0, -1),
                reward=float(random.random()),
                group_id=number // 3,
                episode_id=number,
                prompt_id=f"shown {number // 3}",
                images=table[column].int(),
                pictures=tuple(shown[k] for k in used),
            )
        )
    return RolloutBatch.from_trajectories(trajectories)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fit(
    layout: Layout,
    base: Path,
    steps: int = 3,
    precision: str = "64-true",
    directory: Path | None = None,
    start: Path | None = None,
    follows: bool = False,
    bucket: int | None = None,
    looks: bool = False,
    **source: Any,
) -> dict[str, Any]:
    """Optimizer steps with clipping on the model in `base`, `follows`: held near what it was; the last one's checkpoint
    and model are written to `directory`. Sums over ranks are of `bucket` elements, and none begins early where a
    callback `looks` at gradients."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    with exact():
        module = PolicyModule(
            ModelSource(path=str(base), **source), optimizer=momentum, chunk_tokens=16, live_tokens=32
        )
        metrics = Metrics()
        saved: list[Callback] = []
        if directory is not None:
            saved = [ModelCheckpoint(directory, filename="{step}", every_n_train_steps=steps), SavePretrained()]
        strategy = DTAStrategy(group_size=size, shard_parameters=sharded, calibrate=False)
        strategy._bucket_elements = bucket or strategy._bucket_elements
        run = trainer(
            metrics,
            *saved,
            *([Reads()] if looks else []),
            devices=ranks,
            strategy=strategy,
            max_epochs=-1,
            max_steps=steps,
            precision=precision,
            gradient_clip_val=CLIP,
            enable_checkpointing=bool(saved),
            default_root_dir=directory,
        )
        run.fit(module, Batches([pictured_batch(k) for k in range(3)]), ckpt_path=start)
    cut = [name for name, parameter in module.named_parameters() if isinstance(parameter.data, DTensor)]
    return {
        "parameters": parameters(module),
        "grad_norm": [step["grad_norm"] for step in metrics.steps if "grad_norm" in step],
        "cut": cut,
        "early": strategy._sharded.sums.early if strategy._sharded is not None else 0,
    }
