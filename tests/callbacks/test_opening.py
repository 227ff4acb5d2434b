"""What a fit begins with is counted right: full training, adapters, critics, towers, masters in another precision."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from app.strategies import DTAStrategy
from app.strategies.muon import Muon
from callbacks import Opening
from callbacks.opening import models
from modules import ActorCriticModule, ModelSource, PolicyModule, TreeModule
from modules.models import build_model
from tests.app.tree.engine import families
from tests.helpers.tiny_policy import Batches, make_batch, source, trainer
from tests.helpers.tiny_vision import TinyVision


def opening(module: TreeModule, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """The lines of a fit of two steps."""
    batches = [make_batch(k) for k in range(2)]
    capsys.readouterr()
    trainer(Opening(), **options).fit(module, Batches(batches))
    kinds = ("policy: ", "critic: ", "optimizer: ", "tree engine: ", "first batch: ", "memory of a rank: ")
    return [line for line in "".join(capsys.readouterr()).splitlines() if line.startswith(kinds)]


def elements(module: Any, trained: bool = False) -> int:
    return sum(one.numel() for one in module.parameters() if one.requires_grad or not trained)


def mib(line: str, name: str) -> float:
    found = re.search(rf"{name} ([\d.e-]+) MiB", line)
    assert found, line
    return float(found[1])


def test_all_parameters_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    module = PolicyModule(source())
    policy, engine, first, memory = opening(module, capsys, strategy=DTAStrategy())
    size = elements(module.policy)
    assert policy == f"policy: qwen3 of 2 layers, {size:,} parameters, all trained"
    assert engine.startswith("tree engine: attention sdpa, ")
    batch = make_batch(0)
    said = re.fullmatch(
        r"first batch: (\d+) sequences, (\d+) tokens, (\d+) as a tree \(([\d.]+) times fewer\), in 1 chunk, nothing"
        r" runs twice",
        first,
    )
    assert said and (int(said[1]), int(said[2])) == (len(batch), len(batch.tokens))
    assert float(said[4]) == pytest.approx(int(said[2]) / int(said[3]), rel=0.01)
    assert mib(memory, "weights") == pytest.approx(4 * size / 2**20, rel=0.05)
    assert mib(memory, "gradients") == pytest.approx(4 * size / 2**20, rel=0.05)
    assert mib(memory, "optimizer") >= 0.95 * 8 * size / 2**20  # two moments, and masters where they are apart
    assert re.search(r"the process held at most [\d.]+ (MiB|GiB) so far$", memory)


@pytest.mark.parametrize("strategy", ["auto", "dta"])
def test_an_optimizer_that_steps_matrices_otherwise(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    module = PolicyModule(source(), optimizer=lambda params: Muon(params, lr=1e-3))
    said = opening(module, capsys, strategy=strategy)[1]
    matrices = [one for name, one in module.policy.named_parameters() if "proj" in name]
    size = sum(one.numel() for one in matrices)
    assert said.startswith(f"optimizer: Muon steps {len(matrices)} tensors of matrices with {size:,} elements, AdamW")


def test_a_platform_that_does_not_say_what_was_held(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    memory = opening(PolicyModule(source()), capsys)[-1]
    assert re.fullmatch(r"memory of a rank: weights \S+ MiB, gradients \S+ MiB, optimizer \S+ MiB", memory)


def test_budgets_show_in_the_first_batch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = opening(PolicyModule(source(), chunk_tokens=8, live_tokens=8), capsys)
    said = re.search(r"in (\d+) chunks, (\d+) tokens run forward twice", lines[2])
    assert said and int(said[1]) > 1 and int(said[2]) > 0
    alone = opening(PolicyModule(source(), tree_training_mode="disabled"), capsys)[2]
    assert alone.startswith("first batch: ") and "times fewer" in alone


def test_an_adapter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    build_model(source()).save_pretrained(tmp_path)
    module = PolicyModule(ModelSource(path=str(tmp_path), adapter={"r": 2}))
    policy, _, _, memory = opening(module, capsys)
    size, trained = elements(module.policy), elements(module.policy, trained=True)
    assert 0 < trained < size / 2
    assert policy == (
        f"policy: qwen3 of 2 layers, {size:,} parameters, {trained:,} of them trained ({trained / size:.1%}): LORA of"
        " rank 2 on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    assert mib(memory, "gradients") == pytest.approx(4 * trained / 2**20, rel=0.05)


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ("Qwen3-MoE", "down_proj, gate, gate_up_proj, k_proj, o_proj, q_proj, v_proj"),
        (
            "GPT-OSS",
            "k_proj, o_proj, q_proj, v_proj, none on experts' down_proj, gate_up_proj"
            " (model.adapter.target_parameters)",
        ),
    ],
)
def test_what_adapters_are_on_and_not_on(row: str, places: str, tmp_path: Path) -> None:
    """A list that PEFT makes: it knows the experts of some families."""
    families.build(families.SUPPORTED[row]).save_pretrained(tmp_path)
    holder = nn.Module()
    holder.policy = build_model(ModelSource(path=str(tmp_path), dtype="float32", adapter={"r": 2}))
    [line] = models(holder)
    assert line.endswith(f": LORA of rank 2 on {places}")


@pytest.mark.parametrize("critic", ["shared", "initial"])
def test_a_critic_has_a_line_of_its_own(critic: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = ActorCriticModule(source(), critic, advantage="gae")
    policy, critics = opening(module, capsys)[:2]
    assert policy.endswith(f"{elements(module.policy):,} parameters, all trained")
    assert critics == f"critic: {elements(module.critic):,} parameters, all trained"


@pytest.mark.parametrize("train", [False, True])
def test_a_tower_that_sees(train: bool, tmp_path: Path) -> None:
    vision = TinyVision(tmp_path / "model")
    module = PolicyModule(ModelSource(path=vision.path, train_tower=train))
    module.configure_model()
    (line,) = models(module)
    size, trained = elements(module.policy), elements(module.policy, trained=True)
    assert (trained == size) is train
    state = "all trained" if train else f"{trained:,} of them trained ({trained / size:.1%})"
    found = re.fullmatch(rf"policy: qwen3_vl of \d+ layers, {size:,} parameters, {re.escape(state)}, (.+)", line)
    assert found, line
    tower = f"{size - trained:,} in the tower that sees, frozen"
    assert found[1].endswith("in the tower that sees, trained") if train else found[1] == tower
