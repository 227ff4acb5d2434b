"""A real server of a model of experts says which it chose: those of the untouched model over the whole sequence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel

from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from datamodules.inference.sglang import Launch, SGLangEngine
from datamodules.inference.weight_files import WeightFiles
from datamodules.workflows.episode_routes import EpisodeRoutes
from tests.app.tree.engine.layers.forced import own_choice
from tests.datamodules.inference import engine_suite
from tests.datamodules.inference.embedded.test_experts import alike, whole
from tests.datamodules.inference.engine_suite import CONTEXT, VOCABULARY, prompts_of, tiny_policy
from tests.datamodules.inference.sglang.real_servers.servers import START_S, skip_unless_wanted

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _wanted() -> None:
    skip_unless_wanted()


def policy_of(seed: int = 0) -> PreTrainedModel:
    config = Glm4MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        num_hidden_layers=3,
        first_k_dense_replace=1,  # of which there is no record
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


def generate_all(engine: SGLangEngine, requests: list[GenerationRequest]) -> list[GenerationResponse]:
    return asyncio.run(engine_suite.generate_all(engine, requests))


def said(engine: SGLangEngine, policy: PreTrainedModel, requests: list[GenerationRequest]) -> None:
    for request, response in zip(requests, generate_all(engine, requests), strict=True):
        tokens, start = whole(request, response), request.experts_from
        assert response.experts is not None and response.experts.dtype == torch.uint8
        assert response.experts.shape == (len(tokens) - 1 - (start or 0), 2, 4)
        assert alike(response.experts, own_choice(policy, [tokens])[start:-1])


def test_a_server_of_ours_says_what_it_chose(tmp_path: Path) -> None:
    """Of prompts that others share, of what it had cached, of new weights, and of replies that a text ends."""
    policy, other = policy_of(), policy_of(1)
    launch = Launch(device="cpu", kv_cache_tokens=8192, num_threads=1, log_dir=str(tmp_path))
    engine = SGLangEngine(launch=launch, record_experts=True, start_timeout_s=START_S)
    try:
        engine.start(policy, version=0, seed=0)
        prompts = prompts_of([1, 3, 30, 17])
        for _ in range(2):  # the second time from the cache
            some = [GenerationRequest(list(p), 9, experts_from=min(k, len(p))) for p in prompts for k in range(2)]
            said(engine, policy, some)
        texts: dict[str, Any] = dict(decode=lambda ids: "".join(f"<{one}>" for one in ids), stop_texts=("7>",))
        said(engine, policy, [GenerationRequest(list(p), 40, experts_from=0, **texts) for p in prompts])
        plain = GenerationRequest([5, 6], 4)
        assert generate_all(engine, [plain])[0].experts is None
        routes, first = EpisodeRoutes(), GenerationRequest(list(prompts[2]), 6)
        known = routes.begin(first)
        (response,) = generate_all(engine, [first])
        routes.end(first, response, known)
        later = GenerationRequest([*whole(first, response), 3, 4], 5)
        assert len(routes.begin(later)) == later.experts_from == len(prompts[2]) + 5
        said(engine, policy, [later])
        files = WeightFiles(tmp_path / "weights")
        path, _ = files.write(other, 1)
        engine.update_weights(WeightUpdate(1, path=str(path)))
        said(engine, other, [GenerationRequest(list(p), 9, experts_from=0) for p in prompts])
    finally:
        engine.close()


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(GenerationError, match=r"SGLangEngine.record_experts: Qwen3ForCausalLM has no router"):
        SGLangEngine(urls=["http://127.0.0.1:1"], record_experts=True).start(tiny_policy(), 0, 0)
