"""The Triton kernels over [path | chunk], interpreted: against attention by definition on random trees, inside of the
engine against the dense model, and compiled for GPUs that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.tree import PrefixTree, TreeEngine
from app.tree.attention import BACKENDS, interval
from app.tree.attention.chunk_attention import ChunkAttention, LayerCall
from app.tree.attention.path_cache import PathCache
from app.tree.planning.layout import layout
from app.tree.planning.plan import Chunk
from app.tree.planning.planner import plan
from tests.app.tree import models, oracle
from tests.app.tree.attention.backends import float64_clean
from tests.app.tree.attention.test_backends import ALTERNATING, SEQUENCES
from tests.app.tree.cases import Case, cases
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads
from tests.helpers.selection import some

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F64: 1e-12, F32: 2e-6, BF16: 4e-2, F16: 5e-3}
"""Relative to the largest element, or to 1, the size of what is drawn: a query of one key owes it nothing. Low
precision rounds probabilities, as flash kernels do, and the result."""
FEW = settings(max_examples=max(1, settings.default.max_examples // 6))  # the interpreter takes seconds for each
SMALL = interval.Blocks(*(interval.Shape(*sizes, 4, 2) for sizes in ((32, 16), (16, 32), (16, 16))), columns=True)
BOTH = pytest.mark.usefixtures("small_blocks")
pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.fixture(params=[True, False], ids=["columns", "rows"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for a few dozen tokens; gradients of keys summed as columns, and as rows."""
    monkeypatch.setattr(interval, "blocks_of", lambda q, window: SMALL._replace(columns=request.param))


def ancestors(tree: PrefixTree, token: int) -> list[int]:
    """A token and what it hangs below, root first."""
    chain = []
    while token >= 0:
        chain.append(token)
        token = int(tree.token_parent[token])
    return chain[::-1]


def by_definition(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visible: Tensor, call: LayerCall) -> Tensor:
    """Softmax over keys [1, Hk, m, d] that a bool [n, m] shows each query, and a sink."""
    groups = q.shape[1] // k.shape[1]
    score = q @ k.repeat_interleave(groups, 1).mT * call.scale
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    score = score.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks[None, :, None, None].expand(1, -1, q.shape[2], 1)], -1)
    return score.softmax(-1)[..., : k.shape[2]] @ v.repeat_interleave(groups, 1)


def check_chunk(
    tree: PrefixTree, chunk: Chunk, heads: tuple[int, int, int], dtype: torch.dtype, call: LayerCall, sink: bool
) -> None:
    """Output and all gradients of one chunk; those of the path are added to what was there."""
    rows = layout(chunk, None, 0)
    depths, n, path = tree.token_depth[rows.tokens], len(rows.tokens), chunk.path_tokens
    keys = [*ancestors(tree, int(rows.tokens[0]))[:path], *rows.tokens.tolist()]
    visible = torch.tensor([[key in ancestors(tree, int(token)) for key in keys] for token in rows.tokens])
    if call.window is not None:
        visible &= torch.from_numpy(depths[:, None] - tree.token_depth[keys][None, :] < call.window)
    if call.section is not None:
        sections = depths // call.section, tree.token_depth[keys] // call.section
        visible &= torch.from_numpy(sections[0][:, None] == sections[1][None, :])
    random = torch.Generator().manual_seed(n * 31 + path)
    shapes = [(1, n, heads[0], heads[2])] * 2 + [(1, path + n, heads[1], heads[2])] * 2  # as models have them
    drawn = [torch.randn(shape, generator=random, dtype=F64).to(dtype).transpose(1, 2) for shape in shapes]
    sinks = torch.randn(heads[0], generator=random, dtype=F64).to(dtype) if sink else None
    q, grad, k, v = drawn
    truth = [x.double().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    expected = by_definition(*truth[:3], truth[3] if sink else None, visible, call)
    expected.backward(grad.double())

    cache = PathCache(path + 3, with_grads=True)
    if path:
        cache.push({0: (k, v)}, slice(0, path))
        for buffer in cache.grads(0, 0, path):
            buffer.fill_(2.0)
    running = ChunkAttention(rows, cache, path, depths, BACKENDS["triton"], store=False)
    own = [x.clone().requires_grad_() for x in (q, k[:, :, path:], v[:, :, path:])]
    leaf = None if sinks is None else sinks.clone().requires_grad_()
    assert BACKENDS["triton"].refusal(own[0], call) is None
    out = BACKENDS["triton"].attend(*own, leaf, running, call)
    out.backward(grad)
    returned = [x - 2.0 for x in cache.grads(0, 0, path)] if path else [x[:, :, :0] for x in own[1:]]
    got = [own[0].grad, *(torch.cat([a, b.grad], 2) for a, b in zip(returned, own[1:], strict=True))]
    for found, wanted in zip([out, *got, *([] if leaf is None else [leaf.grad])], [expected, *(x.grad for x in truth)]):
        assert wanted is not None
        error = (found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
        assert error <= TOLERANCE[dtype]
    wide = torch.promote_types(F32, dtype)
    assert out.dtype == dtype and all(x.dtype == wide for x in returned if path)


@BOTH
@FEW
@given(
    case=cases(),
    which=st.integers(0, 99),
    heads=st.sampled_from([(2, 2, 8), (4, 2, 16), (3, 1, 20)]),
    dtype=st.sampled_from([F64, F64, F32, BF16, F16]),
    window=st.sampled_from([None, None, 1, 3, 6, -1, -3, -6]),
    softcap=st.sampled_from([None, 1.5]),
    sink=st.booleans(),
)
def test_a_chunk_of_a_random_tree(
    case: Case, which: int, heads: tuple[int, int, int], dtype: torch.dtype, window: int | None, softcap, sink: bool
) -> None:
    """`window` below 0: sections instead, of so many."""
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    chunks = plan(tree, case.chunk_tokens, tree.num_tokens).chunks
    assume(chunks)  # nothing runs where nothing is scored
    window, section = (None, -window) if window is not None and window < 0 else (window, None)
    call = LayerCall(0, heads[2] ** -0.5, window, softcap, section)
    check_chunk(tree, chunks[which % len(chunks)], heads, dtype, call, sink)


@BOTH
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 30])
def test_blocks_of_other_branches_are_left_out(window: int | None) -> None:
    """Four branches of two blocks each over a path of three."""
    stem = np.arange(45)
    tree = PrefixTree.build([np.append(stem, [1000 + k] * 30) for k in range(4)])
    chunk = plan(tree, 125, 1000).chunks[-1]
    assert chunk.path_tokens > 32 and len(chunk.pieces) > 2
    check_chunk(tree, chunk, (2, 1, 8), F64, LayerCall(0, 0.3, window), False)
    rows = layout(chunk, None, 0)
    found = interval.intervals(rows.ends, tree.token_depth[rows.tokens], chunk.path_tokens, window, SMALL)
    blocks = -(-len(rows.tokens) // 16)
    assert len(found[3]) < 0.75 * blocks * (blocks + 2) / 4
    assert (len(found) == 10) == (window is not None)


@BOTH
@pytest.mark.parametrize("window", some([None, 60], [60]))
def test_blocks_that_all_see_are_computed_without_a_mask(window: int | None) -> None:
    """A long branch beside a short one: of the chunk, and of the path, whole blocks and others."""
    stem = np.arange(45)
    tree = PrefixTree.build([np.append(stem, [1000 + k] * n) for k, n in enumerate((110, 12))])
    chunk = plan(tree, 125, 1000).chunks[-1]
    assert chunk.path_tokens > 32 and len(chunk.pieces) > 1
    check_chunk(tree, chunk, (2, 1, 8), F64, LayerCall(0, 0.3, window), True)
    rows = layout(chunk, None, 0)
    found = interval.intervals(rows.ends, tree.token_depth[rows.tokens], chunk.path_tokens, window, SMALL)
    for bounds in found[2::2]:
        whole, masked = np.diff(bounds).reshape(-1, 2).sum(0)
        assert whole and masked
    assert (len(found) == 10) == (window is not None)


@BOTH
@pytest.mark.parametrize("name", ["gpt_oss", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "qwen2"))])
def test_in_the_engine(name: str) -> None:
    """Every family's windows, soft-capping and sinks, over chunks that are far shorter than the tree is deep."""
    options = {**ALTERNATING.get(name, {}), "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = float64_clean(models.make(name, F64, attn_implementation="eager", **options)).eval()
    sequences = [s[:12] for s in SEQUENCES[1:4]]
    loss = SequenceLoss("tanh_of_sums", [len(s) for s in sequences], 3, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss)
    TreeEngine(model, 6, 9, attention="triton", self_check=False).backward(PrefixTree.build(sequences), loss)
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error <= 1e-9, f"{error:.1e} in {where}"


@BOTH
def test_layers_may_run_again_in_backward() -> None:
    """Gradients of the path are added once."""
    model = models.make("starcoder2", F64, num_attention_heads=2, num_key_value_heads=1)
    sequences = [s[:12] for s in SEQUENCES[1:4]]
    loss = SequenceLoss("plain_sum", [len(s) for s in sequences], 3, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss)
    models.checkpoint(model, use_reentrant=False)
    TreeEngine(model, 6, 1000, attention="triton", self_check=False).backward(PrefixTree.build(sequences), loss)
    assert oracle.relative_error(take_grads(model), expected)[0] <= 1e-9


# Where it cannot run


def stand_in(device: str, dtype: torch.dtype, head: int) -> Tensor:
    class Queries:
        shape = (1, 2, 3, head)

    Queries.device, Queries.dtype = torch.device(device), dtype  # type: ignore[attr-defined]
    return Queries()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("device", "dtype", "head", "capability", "words"),
    [
        ("cuda", BF16, 64, (7, 5), r"compute capability 8\.0 .* has 7\.5"),
        ("cuda", F64, 64, (9, 0), "bfloat16 and float16 on this device, not torch.float64"),
        ("cuda", F32, 64, (9, 0), "bfloat16 and float16 on this device, not torch.float32"),
        ("cuda", BF16, 264, (9, 0), "at most 256, not 264"),
        ("cpu", F32, 264, (9, 0), "at most 256, not 264"),
    ],
)
def test_refusals(device: str, dtype: torch.dtype, head: int, capability, words: str, monkeypatch) -> None:
    monkeypatch.setattr(interval, "capability", lambda device: capability)
    found = BACKENDS["triton"].refusal(stand_in(device, dtype, head), LayerCall(0, 1.0))
    assert found is not None and re.search(words, found) and "sdpa" in found
    good = BACKENDS["triton"].refusal(stand_in(device, BF16, 64), LayerCall(0, 1.0, 5, 2.0))
    assert good is None or capability < (8, 0)


def test_without_triton_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tree = TreeEngine(models.make("qwen3"), attention="triton"), PrefixTree.build([[1, 2, 3]])
    monkeypatch.setattr(interval._operators(), "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"layer 0.*attention='triton' needs a CUDA device.*attention='sdpa'"):
        engine.forward(tree)
    monkeypatch.setattr(interval, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"attention='triton' needs the package triton.*attention='sdpa'"):
        engine.forward(tree)


@pytest.mark.parametrize("which", range(4), ids=["path_k", "path_v", "path_grad_k", "path_grad_v"])
def test_numbers_further_apart_than_int32_counts(which: int) -> None:
    """The last of 33 rows of the path lies 2^31 numbers behind the first; of what lies between no page is touched."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 16, generator=random).half() for _ in range(3))
    path = [torch.randn(1, 1, 33, 16, generator=random).half() for _ in range(2)]
    path += [torch.zeros(1, 1, 33, 16) for _ in range(2)]
    like = path[which]
    apart = torch.empty(2**31 + 16, dtype=like.dtype).as_strided(like.shape, (2**31 + 16, 2**31 + 16, 2**26, 1))
    apart.copy_(like)
    rows = [np.arange(5), np.full(5, 5), *[[0, 0, 1], [0]] * 3]
    found = [torch.tensor(np.ascontiguousarray(x, np.int32)) for x in rows]
    kernels, how = interval._operators(), (found, SMALL.flat(), 0.25, 0, 0.0)
    results = []
    for used in (path, [apart if i == which else x.clone() for i, x in enumerate(path)]):
        out, lse = kernels.interval_attention(q, k, v, *used[:2], None, *how)
        grads = kernels.interval_attention_backward(out, q, k, v, *used, out, lse, *how)
        results.append([out, *grads, *used])
    assert all(torch.equal(near, far) for near, far in zip(*results, strict=True))
    assert bool(path[2][0, 0, -1].any())


def test_lengths_are_not_compiled_for() -> None:
    """Chunks have any number of rows and path tokens; Triton would compile for 1 and for multiples of 16 apart."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import runpy, sys\nk = runpy.run_path(sys.argv[1])\n"  # this file alone, not the whole package
    code += "for one in ('_forward_kernel', '_query_gradient_kernel', '_key_gradient_kernel'):\n"
    code += "    print(*(p.name for p in k[one].params if p.do_not_specialize))"
    command = [sys.executable, "-c", code, str(Path(interval.__file__).with_name("interval_kernels.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines() == ["rows path", "rows path", "rows keys"], done.stderr
