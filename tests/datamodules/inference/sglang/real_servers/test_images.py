"""Pictures on a real server: it reads prompts as the trainer does, its log-probabilities are the untouched model's, and
so they are with new weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang.engine import SGLangEngine
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.embedded.test_images import off_by, prompts, request, run
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.helpers.tiny_vision import TinyVision, noise

pytestmark = pytest.mark.slow


def test_what_a_server_sees_is_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids on two pictures, other grids, two in a prompt and one twice, a picture the processor would resize, the
    replies to them gone on with and shown another; then the same after an update that leaves the tower as it is."""
    monkeypatch.setenv("ARBORIST_SGLANG_API_KEY", KEY)
    vision = TinyVision(tmp_path / "model")
    vision.model.save_pretrained(tmp_path / "model")
    for name, parameter in vision.model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    served = options(vision.path, context=512, kv_cache_tokens=8192, arguments=("--enable-multimodal",))
    server = ServerProcess(served, tmp_path / "server.log", KEY)
    try:
        asyncio.run(server.ready(START_S))
        engine = SGLangEngine(urls=[server.url])
        engine.use_images(vision.images)
        engine.start(vision.model, version=0, seed=1)
        asked = [request(one) for one in [*prompts(vision), vision.prompt(["odd ", noise(5, 51, 37), "!"])]]
        for version in range(2):
            change_language(vision, 1 + 0.1 * version)
            path, _ = WeightFiles(tmp_path / "weights").write(vision.model, version)
            engine.update_weights(WeightUpdate(version, path=str(path)))
            replies = run(engine, asked)
            assert {one for reply in replies for one in reply.versions} == {version}
            assert max(off_by(vision, one, reply) for one, reply in zip(asked, replies)) < 1e-5
        engine.close()
    finally:
        server.stop(0.0)


def change_language(vision: TinyVision, factor: float) -> None:
    """What stands behind the tower."""
    for name, parameter in vision.model.named_parameters():
        if "visual" not in name and "norm" not in name:
            parameter.data *= factor
