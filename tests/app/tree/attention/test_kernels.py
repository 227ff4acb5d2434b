"""Dense attention kernels: output, log-sum-exp, and gradients that add up over parts given the merged result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from app.tree.attention import kernels
from app.tree.attention.kernels import CpuFlash, CudaEfficient, Kernel, Math

HEADS = [(4, 4), (4, 2), (6, 1)]


class BlockedMath(Math):
    """Scores of five queries at a time, as long rows on a GPU would need."""

    @staticmethod
    def _blocks(q: Tensor, k: Tensor) -> Iterator[slice]:
        return (slice(start, min(start + 5, q.shape[2])) for start in range(0, q.shape[2], 5))


KERNELS = [CpuFlash(), Math(), BlockedMath()]
IDS = ["cpu_flash", "math", "math_in_blocks"]
SCALE = 0.37


def inputs(
    heads: tuple[int, int], queries: int, keys: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as transposed views (as models pass them) and a gradient of the output."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(1, queries, heads[0], 8), (1, keys, heads[1], 8), (1, keys, heads[1], 8), (1, queries, heads[0], 8)]
    q, k, v, grad = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for s in shapes)
    return q, k, v, grad


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_add_up_to_the_whole_row(kernel: Kernel, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """A path part (all visible), a causal part and a masked part of one softmax, merged by log-sum-exp."""
    n, path = 37, 50
    q, k, v, grad = inputs(heads, n, path + n, dtype)
    own = torch.ones(n, n, dtype=torch.bool).tril()
    own[20:, 5:20] = False
    for causal in (True, False):
        square = torch.ones(n, n, dtype=torch.bool).tril() if causal else own
        visible = torch.cat([torch.ones(n, path, dtype=torch.bool), square], 1)
        exact = [x.double().detach().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = reference(*exact, visible)
        expected.backward(grad.double())

        parts = [
            (slice(0, path), False, None),
            (slice(path, path + n), causal, None if causal else additive(own, dtype)),
        ]
        runs = [kernel.forward(q, k[:, :, s], v[:, :, s], c, m, SCALE) for s, c, m in parts]
        lse = torch.logaddexp(runs[0][1].double(), runs[1][1].double())
        out = sum(o.double() * (part.double() - lse).exp().unsqueeze(-1) for o, part, _ in runs)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        assert (out - expected).abs().max() < tolerance
        assert (lse - expected_lse).abs().max() < tolerance

        lse_type = torch.promote_types(torch.float32, dtype)
        grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
        for (s, c, m), (_, _, saved) in zip(parts, runs):
            gq, gk, gv = kernel.backward(
                grad.contiguous(), q, k[:, :, s], v[:, :, s], out.to(dtype), lse.to(lse_type), saved, c, m, SCALE
            )
            grads[0] += gq
            grads[1][:, :, s] += gk
            grads[2][:, :, s] += gv
        for got, want in zip(grads, exact):
            assert got.shape == want.grad.shape
            assert (got - want.grad).abs().max() < 10 * tolerance


@pytest.mark.parametrize("kernel", KERNELS, ids=IDS)
def test_one_query_and_one_key(kernel: Kernel) -> None:
    q, k, v, grad = inputs((4, 2), 1, 1, torch.float64)
    out, lse, saved = kernel.forward(q, k, v, True, None, SCALE)
    assert torch.allclose(out, v.repeat_interleave(2, 1))
    gq, gk, gv = kernel.backward(grad.contiguous(), q, k, v, out, lse, saved, True, None, SCALE)
    assert gq.abs().max() < 1e-12 and gk.abs().max() < 1e-12
    assert torch.allclose(gv, grad.unflatten(1, (2, 2)).sum(2))


class Efficient:
    """What torch documents of its memory-efficient kernel, in plain operators: no grouped heads, a log-sum-exp with
    rows to a multiple of 32, which backward wants again, +inf where there is no query, a bias of the query's dtype, its
    rows at multiples of 16 bytes; -inf in it is no number in some releases."""

    @staticmethod
    def scores(q, k, bias, scale):
        if bias is None:
            return q @ k.transpose(-1, -2) * scale
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(-1) == 1
        assert bias.stride(-2) * bias.element_size() % 16 == 0 and not bias.isinf().any()
        return q @ k.transpose(-1, -2) * scale + bias

    @staticmethod
    def _scaled_dot_product_efficient_attention(q, k, v, bias, compute_lse, dropout, causal, *, scale):
        assert q.shape[:2] == k.shape[:2] == v.shape[:2] and compute_lse and not dropout
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        scores = Efficient.scores(q, k, bias, scale)
        scores = scores.masked_fill(~(visible.tril() if causal else visible), float("-inf"))
        lse = scores.logsumexp(-1)
        padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), float("inf"), dtype=lse.dtype)
        padded[:, :, : lse.shape[2]] = lse
        return scores.softmax(-1) @ v, padded, torch.tensor(1), torch.tensor(2)

    @staticmethod
    def _scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale
    ):
        assert grad.shape == out.shape == q.shape and q.shape[:2] == k.shape[:2] and not dropout
        assert (int(seed), int(offset), tuple(wanted)) == (1, 2, (True, True, True, False))
        assert lse.shape[2] % 32 == 0 and (lse[:, :, q.shape[2] :] == float("inf")).all()
        probs = (Efficient.scores(q, k, bias, scale) - lse[:, :, : q.shape[2], None]).exp()
        probs = probs.tril() if causal else probs
        scores = probs * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        return scores @ k, scores.transpose(-1, -2) @ q, probs.transpose(-1, -2) @ grad, None


@pytest.mark.parametrize("heads", HEADS)
def test_memory_efficient_kernel_without_grouped_heads(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain operators, in the layout it is given: the kernel itself needs a GPU."""
    monkeypatch.setattr(kernels, "_aten", Efficient)
    for n, m, causal in ((37, 37, True), (37, 50, False), (64, 3, False)):
        q, k, v, grad = inputs(heads, n, m, torch.float64)
        grad = grad.contiguous()
        out, lse, saved = CudaEfficient().forward(q, k, v, causal, None, SCALE)
        expected, expected_lse, _ = Math().forward(q, k, v, causal, None, SCALE)
        assert (out - expected).abs().max() < 1e-12 and (lse - expected_lse).abs().max() < 1e-12
        merged = (out * 0.7, lse + 0.3)  # as if there were another part
        got = CudaEfficient().backward(grad, q, k, v, *merged, saved, causal, None, SCALE)
        want = Math().backward(grad, q, k, v, *merged, None, causal, None, SCALE)
        assert all(a.shape == b.shape and (a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


def half_hidden(n: int, m: int, dtype: torch.dtype, heads: int | None = None) -> Tensor:
    """Some rows see none of the first keys, and every row one at least; `heads`: a mask for each."""
    shape = (n, m) if heads is None else (1, heads, n, m)
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    visible[..., : n // 2, : m // 2] = False
    visible[..., -1] = True
    return additive(visible, dtype)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("each", [False, True])
def test_memory_efficient_kernel_under_a_mask(
    heads: tuple[int, int], each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_aten", Efficient)
    for n, m in ((37, 50), (5, 64), (64, 3)):
        q, k, v, grad = inputs(heads, n, m, torch.float64)
        mask, grad = half_hidden(n, m, torch.float64, heads[0] if each else None), grad.contiguous()
        out, lse, saved = CudaEfficient().forward(q, k, v, False, mask, SCALE)
        expected, expected_lse, _ = Math().forward(q, k, v, False, mask, SCALE)
        assert (out - expected).abs().max() < 1e-12 and (lse - expected_lse).abs().max() < 1e-12
        merged = (out * 0.7, lse + 0.3)
        got = CudaEfficient().backward(grad, q, k, v, *merged, saved, False, mask, SCALE)
        want = Math().backward(grad, q, k, v, *merged, None, False, mask, SCALE)
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, want, strict=True))


class Broken(Math):
    """As some releases are: no number where the first keys are hidden."""

    def forward(self, q, k, v, causal, mask, scale):
        out, lse, saved = super().forward(q, k, v, causal, mask, scale)
        return out.masked_fill(mask[:, :1].isneginf(), float("nan")), lse, saved


class Refusing(Math):
    def forward(self, q, k, v, causal, mask, scale):
        raise RuntimeError("attn_bias is not correctly aligned")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_is_tried_before_it_is_given_masks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, words in ((Broken(), "off by nan"), (Refusing(), "fails: attn_bias"), (CpuFlash(), None)):
        monkeypatch.setattr(kernels, "_CUDA_EFFICIENT", kernel)
        kernels.takes_masks.cache_clear()
        state = torch.get_rng_state()
        if words is None:
            assert kernels.takes_masks(torch.device("cpu"), dtype, 16)
        else:
            with pytest.warns(UserWarning, match=words):
                assert not kernels.takes_masks(torch.device("cpu"), dtype, 16)
        assert torch.equal(torch.get_rng_state(), state)
    kernels.takes_masks.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masks_on_a_gpu(dtype: torch.dtype, width: int, recwarn: pytest.WarningsRecorder) -> None:
    """Or what stands in the warning: plain torch computes them then."""
    assert kernels.takes_masks(torch.device("cuda"), dtype, width), [str(one.message) for one in recwarn]


def test_scores_held_at_once_are_bounded() -> None:
    """A query over 300,000 keys: at most 64 MiB of scores, one query at least."""
    q, k = torch.empty(1, 16, 500, 8), torch.empty(1, 4, 300_000, 8)
    rows = list(Math._blocks(q, k))
    assert [r.start for r in rows[1:]] == [r.stop for r in rows[:-1]] and (rows[0].start, rows[-1].stop) == (0, 500)
    assert max(r.stop - r.start for r in rows) * 16 * 300_000 * 4 <= 64 * 2**20
    assert len(list(Math._blocks(q, torch.empty(1, 4, 10_000_000, 8)))) == 500
