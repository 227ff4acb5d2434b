"""Optimizers are tried before a model is built, and none is refused that would work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from modules import PolicyModule
from modules.refusals import refuse_optimizer, tell_changes
from tests.helpers.tiny_policy import fit, make_batch, source

Named = Iterable[tuple[str, Tensor]]


class TwoRates(torch.optim.AdamW):
    def __init__(self, params: Named, lr: float = 1e-3, slow: float = 0.0) -> None:
        pairs = list(params)
        embedding = [(name, one) for name, one in pairs if "embed" in name]
        others = [(name, one) for name, one in pairs if "embed" not in name]
        super().__init__([{"params": others}, {"params": embedding, "lr": slow}], lr=lr)


def last_layer(params: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([(name, one) for name, one in params if ".layers.27." in name], lr=1e-3)


def test_groups_that_are_chosen_by_name_train() -> None:
    module = PolicyModule(source(tie_word_embeddings=False), optimizer=TwoRates)
    module.configure_model()
    assert module.policy is not None
    before = {name: one.detach().clone() for name, one in module.policy.named_parameters()}
    steps = fit(module, [make_batch()])
    moved = {name: not torch.equal(before[name], one) for name, one in module.policy.named_parameters()}
    assert steps[0]["lr"] == pytest.approx(1e-3)
    assert [name for name, did in moved.items() if not did] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "made",
    [last_layer, lambda given: torch.optim.Muon(given, lr=1e-3), lambda given: torch.optim.AdamW(given, lr=1e-3)],
)
def test_what_chooses_none_of_the_trial_or_takes_matrices_alone_is_let_through(made: Callable[..., Any]) -> None:
    refuse_optimizer(made, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))


def test_an_option_is_refused_of_one_by_name_too() -> None:
    with pytest.raises(ValueError, match=r"init_args\.lr: Invalid learning rate: -1.0; correct it"):
        refuse_optimizer(lambda given: TwoRates(given, lr=-1.0), None)


def told(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is told of a module's hyper-parameters that were these and are those."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_changes({"hyper_parameters": then}, now, {})
    (line,) = [str(one.message) for one in caught] or [": "]
    return line.partition("other settings: ")[2].split("; ") if caught else []


def test_an_option_that_is_new_or_gone_is_told_where_the_user_wrote_it() -> None:
    def source(**adapter: Any) -> dict[str, Any]:
        return {"model": {"path": "m", "adapter": adapter}}

    assert told(source(r=4), source(r=4, lora_alpha=64)) == ["model.model.adapter.lora_alpha was not set and is 64"]
    assert told(source(r=4, lora_alpha=64), source(r=8)) == [
        "model.model.adapter.r was 4 and is 8",
        "model.model.adapter.lora_alpha was 64 and is not set",
    ]
    nested = source(r=4, rank_pattern={}), source(r=4, rank_pattern={"q_proj": 8})
    assert told(*nested) == ["model.model.adapter.rank_pattern.q_proj was not set and is 8"]
    options = [{"objective_options": one} for one in ({"clip_low": 0.1}, {"clip_low": 0.1, "clip_high": 0.3})]
    assert told(*options) == ["model.objective_options.clip_high was not set and is 0.3"]
    assert told(source(r=4), source(r=4)) == []


def test_an_argument_that_another_version_has_is_no_change() -> None:
    then = {"model": {"path": "m", "adapter": None, "dropped": 1}, "removed": 1}
    now = {"model": {"path": "m", "adapter": None, "freeze": []}, "aggregation": "token_mean"}
    assert told(then, now) == told(now, then) == []
