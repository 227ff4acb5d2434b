"""What `arborist export` writes, a real server loads, and it computes what the exported model computes."""

from __future__ import annotations

import ast
import asyncio
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.cli.export import export
from datamodules.inference.sglang.launcher import ServerProcess, server_python
from tests.app.cli.verbs import export_jobs
from tests.app.tree.states import hybrids
from tests.datamodules.inference.engine_suite import reference_logprobs
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.helpers.rank_pool import RankPool


@pytest.mark.slow
def test_a_server_serves_what_two_ranks_saved(tmp_path: Path) -> None:
    ranks = RankPool(2)
    try:
        ranks.run(export_jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=True)
    finally:
        ranks.close()
    export(tmp_path / "step.ckpt", tmp_path / "model", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    server = ServerProcess(options(str(tmp_path / "model")), tmp_path / "server.log", KEY)
    prompt = [5, 9, 2, 33, 41]

    async def ask() -> dict:
        await server.ready(START_S)
        client = server.client()
        sampling = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
        try:
            return await client.post(
                "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}, 60.0
            )
        finally:
            await client.close()

    try:
        answer = asyncio.run(ask())
    finally:
        server.stop(0.0)
    tokens = answer["output_ids"]
    said = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert len(tokens) == 20
    torch.testing.assert_close(said, reference_logprobs(model, prompt, tokens, 1.0), atol=1e-5, rtol=0)


def test_hybrids_without_a_class_of_their_own_are_the_documented_ones() -> None:
    """By the entry classes of its model files: most of them import on GPUs alone."""
    where = "import importlib.util; print(importlib.util.find_spec('sglang').origin)"
    origin = subprocess.run(
        [str(server_python()), "-c", where], capture_output=True, text=True, check=True, timeout=500
    )
    served: set[str] = set()
    for file in (Path(origin.stdout.strip()).parent / "srt" / "models").glob("*.py"):
        for line in ast.parse(file.read_text()).body:
            if isinstance(line, ast.Assign) and getattr(line.targets[0], "id", None) == "EntryClass":
                served |= {node.id for node in ast.walk(line.value) if isinstance(node, ast.Name)}
    assert "Qwen3ForCausalLM" in served
    missing = {name for name in hybrids.OPTIONS if type(hybrids.make(name)).__name__ not in served}
    assert missing == {"olmo_hybrid", "lfm3", "bamba", "bailing_hybrid", "qwen4_exp_text"}  # Ling 3 has another name
