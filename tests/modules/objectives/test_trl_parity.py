"""Losses and gradients equal TRL's on the same tensors, to 1e-5. TRL lives in an environment of its own: `make trl`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modules import Regulariser
from modules.algorithm import Algorithm, LossInputs
from modules.objectives import token_weights

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
ROWS, LENGTH, LIMIT = 12, 9, 16

# Name -> (arguments of TRL's GRPOConfig, options of Algorithm, aggregation).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None]] = {
    "grpo": ({"loss_type": "grpo"}, {}, "sequence_mean"),
    "grpo, asymmetric, kl": (
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.05, "use_bias_correction_kl": False},
        {"objective_options": {"clip_low": 0.1, "clip_high": 0.3}, "regularisers": [Regulariser("kl", 0.05)]},
        "sequence_mean",
    ),
    "grpo, weighted kl": (
        {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": True},
        {"regularisers": [Regulariser("kl_weighted", 0.05)]},
        "sequence_mean",
    ),
    "grpo, dual clip": (
        {"loss_type": "grpo", "delta": 1.5},
        {"objective_options": {"dual_clip": 1.5}},
        "sequence_mean",
    ),
    "dr_grpo": ({"loss_type": "dr_grpo", "max_completion_length": LIMIT}, {}, "constant"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"objective": "dapo"}, None),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"objective": "gspo"},
        None,
    ),
    "gspo, wide": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
        {"objective": "gspo", "objective_options": {"clip_low": 0.1, "clip_high": 0.2}},
        None,
    ),
    "sapo": ({"loss_type": "sapo"}, {"objective": "sapo"}, None),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.2},
        {"objective": "cispo", "objective_options": {"clip_high": 0.2}},
        None,
    ),
}


def tensors() -> dict[str, Tensor]:
    """Unequal lengths; one of them a single token."""
    rng = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(ROWS, LENGTH, generator=rng)
    old, reference = (logprobs + 0.3 * torch.randn(ROWS, LENGTH, generator=rng) for _ in range(2))
    lengths = torch.tensor([1, *torch.randint(2, LENGTH + 1, (ROWS - 1,), generator=rng).tolist()])
    mask = torch.arange(LENGTH) < lengths[:, None]
    advantages = torch.randn(ROWS, generator=rng)
    return {"logprobs": logprobs, "old": old, "reference": reference, "advantages": advantages, "mask": mask}


def ours(options: dict[str, Any], aggregation: str | None) -> tuple[Tensor, Tensor]:
    given, algorithm = tensors(), Algorithm(**options)
    inputs: dict[str, Any] = {name: value.reshape(-1) for name, value in given.items() if value.dim() == 2}
    logprobs = inputs["logprobs"] = inputs["logprobs"].clone().requires_grad_()
    inputs["advantages"] = given["advantages"].repeat_interleave(LENGTH)
    inputs["cu_seqlens"] = torch.arange(0, ROWS * LENGTH + 1, LENGTH)
    given_to_all = LossInputs(**inputs)
    losses = algorithm.losses(given_to_all)[0] + algorithm.costs(given_to_all)[0]
    mode: Any = aggregation or algorithm.traits.aggregation
    weights = token_weights(given["mask"].sum(1), mode, float(LIMIT)).float().repeat_interleave(LENGTH)
    loss = (losses * weights * inputs["mask"]).sum()
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad.reshape(ROWS, LENGTH)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed: `make trl` builds an environment for it")
    folder = tmp_path_factory.mktemp("trl")
    given = {"tensors": tensors(), "cases": {name: case[0] for name, case in CASES.items()}}
    torch.save(given, folder / "in.pt")
    command = [
        str(PYTHON),
        str(Path(__file__).with_name("trl_losses.py")),
        str(folder / "in.pt"),
        str(folder / "out.pt"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_trls(case: str, theirs: dict[str, tuple[Tensor, Tensor]]) -> None:
    _, options, aggregation = CASES[case]
    loss, grad = ours(options, aggregation)
    torch.testing.assert_close(loss, theirs[case][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(grad, theirs[case][1], atol=1e-5, rtol=0)
    assert float(grad.abs().max()) > 1e-3
