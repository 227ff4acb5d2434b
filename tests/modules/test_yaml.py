"""The modules as a YAML file configures them: typed arguments, nested sources, callables by import path."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import jsonargparse
import pytest
import torch

from modules import ActorCriticModule, ModelSource, PolicyModule, SFTModule, TreeModule
from modules.regularisers import SteppedCoef
from modules.step import with_names
from tests.helpers.tiny_policy import CONFIG


def configure(class_path: str, making: Any = None, **init_args: Any) -> TreeModule:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    if making is not None:
        parser.add_instantiator(making, object)
    parser.add_subclass_arguments(TreeModule, "model")
    config = parser.parse_object({"model": {"class_path": class_path, "init_args": init_args}})
    parser.dump(config)  # what config.yaml of a run is written from
    return parser.instantiate(config).model


def test_a_policy_with_everything() -> None:
    module = configure(
        "modules.PolicyModule",
        model={"config": CONFIG, "dtype": "float32"},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        lr_scheduler={"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}},
        advantage="modules.advantages.grpo",
        advantage_options={"std": "none"},
        objective="gspo",
        objective_options={"clip_high": 1e-3},
        regularisers=[
            {"name": "kl", "coef": 0.1, "options": {"estimator": "k2"}},
            {
                "name": "entropy",
                "coef": {"class_path": "modules.regularisers.SteppedCoef", "init_args": {"target": 0.3, "delta": 0.01}},
            },
            {"name": "overlong", "coef": 1.0, "where": "reward", "options": {"max_tokens": 8, "buffer_tokens": 2}},
        ],
        correction="truncated",
        correction_options={"level": "sequence"},
        proximal="interpolated",
        reference={"config": CONFIG},
        reference_refresh={"every": 4, "ema": 0.5},
        minibatches=2,
        live_tokens=100,
    )
    assert isinstance(module, PolicyModule)
    module.configure_model()
    made = module.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD) and made["optimizer"].defaults["lr"] == 0.5
    assert made["lr_scheduler"]["scheduler"].step_size == 3 and made["lr_scheduler"]["interval"] == "step"
    algorithm = module.algorithm
    assert algorithm.advantage.options == {"std": "none"} and algorithm.objective.name == "gspo"
    assert [(r.coef, c.options) for r, c in algorithm.loss_costs] == [
        (0.1, {"estimator": "k2"}),
        (SteppedCoef(0.3, delta=0.01), {}),
    ]
    assert [c.name for _, c in algorithm.reward_costs] == ["overlong"]
    assert algorithm.correction.options == {"level": "sequence"} and algorithm.proximal == "interpolated"
    assert module.aggregation() == ("sequence_mean", None)  # GSPO's own
    assert module.reference.model.config.hidden_size == 16


class Making:
    def __call__(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        return class_type(*args, **kwargs)


def test_a_module_is_copied_without_what_made_it() -> None:
    """As Lightning's `WeightAveraging` does. What makes the objects of a command line holds the run."""
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    scheduler = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 3}}
    options = {"model": {"config": CONFIG}, "optimizer": optimizer, "lr_scheduler": scheduler}
    module = configure("modules.SFTModule", making := Making(), **options)
    making.run = threading.Lock()  # type: ignore[attr-defined]
    module.configure_model()
    copied = copy.deepcopy(module)
    assert all(map(torch.equal, copied.parameters(), module.parameters()))
    made = copied.configure_optimizers()
    assert made["optimizer"].defaults["lr"] == 0.5 and made["lr_scheduler"]["scheduler"].step_size == 3


@pytest.mark.parametrize("make", [PolicyModule, ActorCriticModule, SFTModule])
def test_a_module_is_pickled_with_its_default_optimizer(make: Any) -> None:
    """As launchers that spawn processes do."""
    module = make(ModelSource(config=CONFIG))
    module.configure_model()
    read = pickle.loads(pickle.dumps(module))
    assert all(map(torch.equal, read.parameters(), module.parameters()))
    assert isinstance(read.configure_optimizers(), torch.optim.AdamW)


@pytest.mark.parametrize("advantage", ["grpo", "modules.advantages.grpo"])
def test_short_and_long_names(advantage: str) -> None:
    module = configure(
        "modules.PolicyModule",
        model={"config": CONFIG},
        advantage=advantage,
        regularisers=[{"name": "kl", "coef": 0.1}],
        reference="initial",
    )
    assert module.algorithm.advantage.name == "grpo"


def test_an_actor_and_a_critic() -> None:
    module = configure(
        "modules.ActorCriticModule",
        model={"config": CONFIG},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}},
        critic={"config": CONFIG},
        critic_lr=0.25,
        value_clip=0.2,
        advantage="gae_turn",
        minibatches=2,
        tree_training_mode="sparse",
    )
    assert isinstance(module, ActorCriticModule) and module.steps_per_batch == 2
    module.configure_model()
    assert [group["lr"] for group in module.configure_optimizers().param_groups] == [0.5, 0.25]


def test_defaults() -> None:
    module = configure("modules.SFTModule", model={"config": CONFIG})
    assert isinstance(module, SFTModule)
    module.configure_model()
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": {"path": "x", "config": CONFIG}}, "model.path or model.config, both are set"),
        ({"model": {"config": CONFIG}, "clip": 0.2}, "clip"),
        ({"model": {"config": CONFIG}, "minibatches": "two"}, "minibatches"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, jsonargparse.ArgumentError), match=message):
        configure("modules.PolicyModule", **arguments)


@pytest.mark.parametrize("kind", ["generator", "one", "pairs", "groups of pairs"])
def test_whatever_torch_takes_is_named(kind: str) -> None:
    layer = torch.nn.Linear(2, 3)
    pairs = list(layer.named_parameters())
    groups: dict[str, Any] = {
        "generator": layer.parameters(),
        "one": [{"params": layer.weight}, {"params": layer.bias}],
        "pairs": pairs,
        "groups of pairs": [{"params": pairs}],
    }
    made = torch.optim.SGD(with_names(groups[kind], layer), lr=0.1).param_groups
    assert [name for group in made for name in group["param_names"]] == ["weight", "bias"]
    assert [param for group in made for param in group["params"]] == [layer.weight, layer.bias]
