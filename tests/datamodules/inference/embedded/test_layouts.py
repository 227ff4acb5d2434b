"""Pictures that a family's own processor lays out, from prompts to gradients: ids are that processor's, sampled
log-probabilities those of the untouched model on what it makes of text and pictures, and a step's gradient, too."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from app.batch import RolloutBatch, Trajectory
from app.strategies.ranks.wire import pack, unpack
from app.tree import PrefixTree, SequenceOutputs, TreeEngine, picture_processor
from datamodules.files.picture_files import PictureError
from datamodules.files.recording import RolloutRecorder, read_batch
from datamodules.groups import Group, to_batch
from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.workflows import EpisodeEngine, Turns
from datamodules.workflows.turns import ReplyOptions
from tests.app.tree import oracle
from tests.app.tree.engine.pictures import vision
from tests.app.tree.parity import take_grads
from tests.helpers.selection import some
from tests.helpers.tiny_layouts import NAMES, TinyLayouts
from tests.helpers.tiny_vision import noise

A, B = noise(1, 24, 24), noise(2, 24, 24)
WIDE, LARGE = noise(3, 17, 50), noise(4, 90, 61)  # tiled otherwise, none of them of a size that is kept
MESSAGES: list[list[str | np.ndarray]] = [
    ["look ", A, " how many?"],
    ["look ", B, " how many?"],
    [WIDE, "a", A, "b"],
    [A, "a", A, "\nb"],
    ["one\n", LARGE, "\n", WIDE, "\n and ", A, "."],
    ["text alone"],
]


NEEDS = {"SmolVLM": "num2words", "Mistral3": "torchvision"}
"""Packages without which transformers has no processor of the family."""
THERE = {name: name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None for name in NAMES}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.skipif(not THERE[name], reason=f"{NEEDS.get(name)} is not installed"))
        for name in NAMES
    ],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyLayouts:
    return TinyLayouts(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.mark.parametrize("message", MESSAGES)
def test_prompts_are_what_the_familys_processor_makes(tiny: TinyLayouts, message: list[str | np.ndarray]) -> None:
    prompt = tiny.prompt(message)
    assert list(prompt.tokens) == tiny.inputs(message)["input_ids"][0].tolist()
    shown = [prompt.pictures[k].key if k >= 0 else None for k in prompt.images]
    expected = [tiny.images.picture(part, "here") for part in message if not isinstance(part, str)]
    assert [key for key in shown if key] == [one.key for one in expected for _ in range(one.tokens)]
    placeholders = [token == tiny.images.placeholder for token in prompt.tokens]
    assert placeholders == [key is not None for key in shown] or not prompt.pictures


def sampled(tiny: TinyLayouts, **options: int) -> list[tuple[int, GenerationRequest, GenerationResponse]]:
    """Two replies to each message, with the message's number."""
    made = EmbeddedEngine(**{"kv_cache_tokens": 8192, "num_threads": 1, **options})
    made.use_images(tiny.images)
    made.start(tiny.model, version=0, seed=1)
    asked = []
    for number, message in enumerate(MESSAGES):
        prompt = tiny.prompt(message)
        images = list(prompt.images) if prompt.pictures else None
        for _ in range(2):
            asked.append((number, GenerationRequest(list(prompt.tokens), 6, images=images, pictures=prompt.pictures)))

    async def together() -> list[GenerationResponse]:
        return list(await asyncio.gather(*(made.generate(one) for _, one in asked)))

    try:
        replies = asyncio.run(together())
    finally:
        made.close()
    return [(number, one, reply) for (number, one), reply in zip(asked, replies)]


@pytest.mark.parametrize("options", some([{}, {"max_batch_tokens": 5}, {"cuda_graphs": True}], [{}]), ids=str)
def test_sampled_log_probabilities_are_the_untouched_models(tiny: TinyLayouts, options: dict[str, int]) -> None:
    """Chunks of 5 tokens begin and end inside of tiles; not where placeholders see each other, of which 70 may be next
    to each other."""
    if tiny.name == "Gemma 4, large" and "max_batch_tokens" in options:
        with pytest.raises(GenerationError, match=r"has 64 placeholders next to .* max_batch_tokens=5 .*set it to 64"):
            sampled(tiny, **options)
        options = {"max_batch_tokens": 70}
    for number, _, reply in sampled(tiny, **options):
        with torch.no_grad():
            expected = tiny.logprobs(MESSAGES[number], reply.tokens)
        assert (torch.tensor(reply.logprobs) - expected).abs().max() < 1e-5


def test_a_step_on_the_tree_has_the_gradient_of_the_untouched_model(tiny: TinyLayouts) -> None:
    """Of the rollouts above, every weight of tower, projector and language model; and the self-check passes."""
    rollouts = sampled(tiny)
    batch = RolloutBatch.from_trajectories(
        Trajectory(
            tokens=[*one.tokens, *reply.tokens],
            loss_mask=[False] * len(one.tokens) + [True] * len(reply.tokens),
            behavior_logprobs=[0.0] * len(one.tokens) + reply.logprobs,
            versions=[-1] * len(one.tokens) + reply.versions,
            reward=1.0,
            group_id=number,
            episode_id=k,
            images=[*one.images, *[-1] * len(reply.tokens)] if one.images else None,
            pictures=one.pictures,
        )
        for k, (number, one, reply) in enumerate(rollouts)
    )
    assert batch.images is not None
    tree = PrefixTree.build(
        batch.sequences(), batch.split(batch.loss_mask), images=batch.split(batch.images), pictures=batch.pictures
    )
    weights = torch.randn(len(rollouts), 6, generator=torch.Generator().manual_seed(0))
    tiny.model.requires_grad_(True)
    for k, (number, _, reply) in enumerate(rollouts):
        (tiny.logprobs(MESSAGES[number], reply.tokens) * weights[k, : len(reply.tokens)]).sum().backward()
    expected = {name: grad for name, grad in take_grads(tiny.model).items() if grad is not None}
    assert sum(float(grad.abs().max()) > 0 for name, grad in expected.items() if "vision" in name) > 10
    least = 64 if tiny.name == "Gemma 4, large" else 40  # a picture that no chunk cuts
    engine = TreeEngine(tiny.model, least, 90, image_processor=picture_processor(tiny.path))

    def loss(out: SequenceOutputs, k: int) -> torch.Tensor:
        assert out.logprobs is not None
        count = len(rollouts[k][2].tokens)
        return (out.logprobs[-count:] * weights[k, :count]).sum()

    engine.backward(tree, loss)
    found = take_grads(tiny.model)
    assert oracle.relative_error(found, expected)[0] < 2e-6
    report = engine.verify(tree)
    assert report is not None and report.passed, str(report)


def test_a_conversation_is_shown_pictures_later_and_recorded_as_it_was(tiny: TinyLayouts, tmp_path: Path) -> None:
    """Replies are the untouched model's in both turns; and files and messages between ranks keep where pictures are."""
    made = EmbeddedEngine(kv_cache_tokens=8192, num_threads=1)
    made.use_images(tiny.images)
    made.start(tiny.model, version=0, seed=1)
    episode = EpisodeEngine(made, tiny.tokenizer, None, name="e", seed="s", image_processor=tiny.images)
    options = ReplyOptions("Test", 5, 1.0)
    options.prepare(tiny.tokenizer)
    first, second = ["look ", WIDE, "?"], ["and ", A, " or\n", WIDE, "?"]
    turns, later = Turns(tiny.prompt(first), options), tiny.prompt(second)

    async def converse() -> None:
        await turns.generate(episode)
        turns.extend(later.tokens, later.images, later.pictures)
        await turns.generate(episode)

    asyncio.run(converse())
    made.close()
    (one,) = turns.trajectories("whole", 1.0, {})
    with torch.no_grad():
        expected = tiny.scored(one.tokens.tolist(), tiny.pixels([WIDE, " ", A, " ", WIDE]))[one.loss_mask[1:]]
    assert (one.behavior_logprobs[one.loss_mask] - expected).abs().max() < 1e-5
    assert one.tokens[~one.loss_mask].tolist() == [
        token for message in (first, second) for token in tiny.inputs(message)["input_ids"][0].tolist()
    ]
    RolloutRecorder(tmp_path).write(0, [Group(0, "p", 1, [one])])
    batch = unpack(*pack(to_batch(read_batch(tmp_path, 0))))
    assert one.images is not None and batch.images is not None
    shown, kept = (
        [[None, *pictures][k + 1] for k in column]
        for pictures, column in (
            ([p.key for p in one.pictures], one.images),
            ([p.key for p in batch.pictures], batch.images),
        )
    )
    assert shown == kept and torch.equal(batch.tokens, one.tokens)


@pytest.mark.parametrize("name", [name for name in NAMES if not THERE[name]])
def test_a_processor_that_needs_what_is_missing_is_refused_where_a_picture_is_shown(tmp_path: Path, name: str) -> None:
    tiny = TinyLayouts(tmp_path, name)
    assert tiny.prompt(["text"]).tokens
    with pytest.raises(
        PictureError, match=rf"(?i)prompt 'p', picture 0: .*processor of a {name.lower()}.*{NEEDS[name]}"
    ):
        tiny.prompt([A, "?"])


def test_a_model_whose_pictures_see_each_other_is_shown_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts could be laid out, and replies would be of another model, in silence."""
    tiny = TinyLayouts(tmp_path, "LLaVA")
    vision.all_pictures_see_each_other(monkeypatch)
    made = EmbeddedEngine(kv_cache_tokens=512, num_threads=1)
    made.use_images(tiny.images)
    made.start(vision.make("Gemma 3").model, version=0, seed=1)
    prompt = tiny.prompt([A])
    shown = GenerationRequest([0] * len(prompt.tokens), 2, images=list(prompt.images), pictures=prompt.pictures)
    with pytest.raises(GenerationError, match=r"request.pictures: .*placeholders see tokens after them in Gemma3"):
        asyncio.run(made.generate(shown))
    assert asyncio.run(made.generate(GenerationRequest([1, 2], 2))).tokens
    made.close()


# torchvision beside a CPU build of torch, as `datamodules.inference.sglang.server.cpu_shims` has it
_BESIDE = """
import sys, torch
for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(THERE["Mistral3"], reason="torchvision is there: the tests above have run")
def test_mistral3_with_the_torchvision_of_the_servers(tmp_path: Path) -> None:
    """Its processor is there with torchvision alone, which no plain environment for CPUs has."""
    found = [*(Path(__file__).parents[4] / ".venv-sglang").glob("lib/python3*/site-packages/torchvision*")]
    if not found:
        pytest.skip("no environment of servers")
    for one in found:
        (tmp_path / one.name).symlink_to(one)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", _BESIDE, "-q", "-p", "no:cacheprovider", __file__, "-k", "Mistral3"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout and "failed" not in done.stdout, done.stdout[-4000:]
