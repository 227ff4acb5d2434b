"""Servers that do not fit the trainer's model are refused before anything is sent to them."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.common.receiver import MODEL_INFO, SERVER_INFO
from datamodules.inference.sglang.model_match import ModelMatch
from datamodules.inference.sglang.roster import given_servers
from datamodules.inference.sglang.server_state import WrongModel
from datamodules.inference.sglang.weights.forms import DiskWeights
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.fuzz.hostile_server import Answer, HostileServer, said


def checked(hostile: HostileServer, match: ModelMatch) -> str:
    """What the server calls the model that it joins with."""

    async def check() -> str:
        (server,) = given_servers([hostile.url], None, 4)
        try:
            await match.check(server)
        finally:
            await server.disconnect()
        return server.below

    return asyncio.run(check())


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({}, r"does not say which experts it chooses.*--enable-return-routed-experts"),
        (
            {"enable_return_routed_experts": True, "enable_hierarchical_cache": True},
            "experts other tokens were sent to",
        ),
        ({"enable_return_routed_experts": True, "enable_hierarchical_cache": False}, ""),
        (
            {"enable_return_routed_experts": True, "moe_runner_backend": "triton_kernel"},
            "start it with --moe-runner-backend triton .*SGLangEngine.launch.arguments",
        ),
        ({"enable_return_routed_experts": True, "moe_runner_backend": "triton"}, ""),
    ],
)
def test_servers_that_cannot_say_which_experts_they_chose(serving: dict[str, bool | str], message: str) -> None:
    def act(path: str, body: bytes) -> Answer | None:
        model = {**MODEL_INFO, "architectures": ["Qwen3ForCausalLM"]}
        return {"/model_info": said(model), "/server_info": said({**SERVER_INFO, **serving})}.get(path)

    with HostileServer() as hostile:
        hostile.act = act
        checked(hostile, ModelMatch(tiny_policy()))
        with pytest.raises(WrongModel, match=message) if message else nullcontext():
            checked(hostile, ModelMatch(tiny_policy(), records=True))


@pytest.mark.parametrize("by", ["directory", "flag"])
def test_servers_whose_weights_are_in_few_bits(by: str, tmp_path: Path) -> None:
    """They would cast whole ones to theirs in silence; the model below an adapter is not sent to them."""
    kept = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(kept if by == "directory" else {}))
    model = {**MODEL_INFO, "architectures": ["Qwen3ForCausalLM"], "model_path": str(tmp_path)}
    info = {**SERVER_INFO, "quantization": "fp8" if by == "flag" else None}
    with HostileServer() as hostile:
        hostile.act = lambda path, body: {"/model_info": said(model), "/server_info": said(info)}.get(path)
        with pytest.raises(WrongModel, match=r"keeps its weights in 'fp8' .* start it with whole weights"):
            checked(hostile, ModelMatch(tiny_policy()))
        checked(hostile, ModelMatch(with_lora(tiny_policy()), adapter=True))


def test_half_precision_is_said_once_where_the_trained_model_is_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    def serving(dtype: str) -> None:
        def act(path: str, body: bytes) -> Answer | None:
            model = {**MODEL_INFO, "architectures": ["Qwen3ForCausalLM"]}
            return {"/model_info": said(model), "/server_info": said({**SERVER_INFO, "dtype": dtype})}.get(path)

        hostile.act = act

    with HostileServer() as hostile:
        serving("float32")
        checked(hostile, ModelMatch(tiny_policy()))
        serving("auto")
        checked(hostile, ModelMatch(tiny_policy().bfloat16()))
        assert not caplog.messages
        match = ModelMatch(tiny_policy())
        checked(hostile, match)
        checked(hostile, match)
    (message,) = caplog.messages
    assert "half precision (--dtype auto)" in message and "SGLangEngine.launch.dtype" in message


def test_adapters_do_not_go_onto_weights_that_a_run_gave() -> None:
    with HostileServer() as hostile:
        model = {**MODEL_INFO, "architectures": ["Qwen3ForCausalLM"]}
        hostile.act = lambda path, body: (
            said({**model, "weight_version": hostile.version}) if path == "/model_info" else None
        )
        hostile.version = "default"
        match = ModelMatch(with_lora(tiny_policy()), adapter=True)
        assert checked(hostile, match) == "default"
        hostile.version = DiskWeights(3, 0, "/of/another/run").label
        with pytest.raises(
            WrongModel, match=r"serves weights 'v3-\w+', which a run gave it, and not those of the model"
        ):
            checked(hostile, match)
        checked(hostile, ModelMatch(tiny_policy()))  # whole weights are loaded over them
