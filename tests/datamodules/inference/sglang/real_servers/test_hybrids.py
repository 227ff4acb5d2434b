"""Models whose layers carry a state, on real servers: what they read of an export, and one that is served.

Of the hybrids sglang 0.5.21 has kernels for CPUs, or ones that Triton's interpreter can run, for short convolutions
alone: scans need sgl_kernel or a GPU. Of the others the configuration is read with sglang's own classes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from datamodules.inference.sglang.launcher import ServerProcess, server_python
from datamodules.inference.weight_files import WeightFiles
from tests.app.tree.states import hybrids
from tests.datamodules.inference.engine_suite import CONTEXT, VOCABULARY
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.datamodules.inference.sglang.real_servers.test_weight_sync import METHODS, Kept

pytestmark = pytest.mark.slow

_READ = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import cpu_shims
cpu_shims.install()
from sglang.srt.utils.hf_transformers.config import get_config
found = {}
for path in sys.argv[2:]:
    config = get_config(path, trust_remote_code=False)
    scans = getattr(config, "mamba_layer_ids", None) or config.linear_layer_ids
    found[os.path.basename(os.path.dirname(path))] = [list(scans), list(config.full_attention_layer_ids)]
print(json.dumps(found))
"""
_SERVER = Path(__file__).resolve().parents[5] / "datamodules" / "inference" / "sglang" / "server"
_SCANS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "granitemoehybrid", "kimi_linear")


def a_policy(seed: int = 0, name: str = "lfm2"):
    return hybrids.make(name, seed=seed, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT).eval()


def test_a_hybrid_is_served_and_every_weight_of_it_updated(tmp_path: Path) -> None:
    """Every log-probability is the trainer's to 1e-5, through three versions that share no weight, by both methods."""
    path, _ = WeightFiles(tmp_path / "first").write(a_policy(), 0)
    served = options(str(path), kv_cache_tokens=4096, max_running_requests=8, label="v0-00000000")
    server = ServerProcess(served, tmp_path / "server.log", KEY)

    async def body() -> None:
        await server.ready(START_S)
        kept = Kept(server, tmp_path / "weights")
        try:
            assert await kept.worst(a_policy(), 0) < 1e-5
            for version, method in enumerate(METHODS, 1):
                await kept.bring(a_policy(version), version, method)
                assert await kept.worst(a_policy(version), version) < 1e-5
                assert await kept.worst(a_policy(version - 1), version) > 0.1
        finally:
            await kept.close()

    try:
        asyncio.run(asyncio.wait_for(body(), START_S + 150))
    finally:
        server.stop(0.0)


def test_servers_see_the_layers_that_are_there(tmp_path: Path) -> None:
    """By the configuration of an export, whose words for layers are not those of the trainer's transformers."""
    paths, expected = [], {}
    for name in _SCANS:
        policy = hybrids.make(name)
        paths.append(str(WeightFiles(tmp_path / name).write(policy, 0)[0]))
        layers = policy.config.layer_types
        expected[name] = [
            [index for index, layer in enumerate(layers) if layer == kind]
            for kind in ("linear_attention", "full_attention")
        ]
    command = [str(server_python()), "-c", _READ, str(_SERVER), *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
