"""Times the `triton` backend's kernels at other blocks than the backend chooses, on the chunks of a real plan.

    python -m benchmarks.gpu.blocks [--heads 16 8] [--head 128] [--out benchmarks/results/gpu]     # 40 seconds

Promises: chunks are those of `turns` 8x4 at 23,552 tokens; a figure is the median of three runs of all of them, one
layer, by CUDA events, after a run that compiles; outputs and gradients are compared with those of the first shape
(`difference`). Operations are counted as needed: pairs that a query sees, times 4 of a head's size forward, 6 for
the gradients of queries and 8 for those of keys. Beside them ATen's FlashAttention-2 and cuDNN's attention on a path of
4,096 keys and on one causal square of 8,192. Needs a GPU and Triton.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.tree.attention import interval_kernels
from app.tree.attention.interval import Blocks, Shape, blocks_of, intervals
from app.tree.planning.layout import layout
from app.tree.planning.planner import plan
from benchmarks.common.failures import described
from benchmarks.common.measure import environment
from benchmarks.common.records import write_json
from benchmarks.common.workloads import conversations, make_case

CHUNK, VOCABULARY = 23_552, 151_936
SHAPES: dict[str, tuple[Shape, ...]] = {
    "forward": (*(Shape(128, 64, 8, n) for n in (2, 3, 4)), Shape(128, 128, 8, 2), Shape(64, 64, 4, 3)),
    "queries' gradient": (*(Shape(128, 64, 8, n) for n in (2, 3)), Shape(64, 64, 4, 3)),
    "keys' gradient, chunk": (Shape(128, 64, 8, 2), *(Shape(64, 64, 4, n) for n in (2, 3))),
    "keys' gradient, path": (Shape(128, 64, 8, 2), *(Shape(64, 64, 4, n) for n in (2, 3))),
}
PER_PAIR = {"forward": 4, "queries' gradient": 6, "keys' gradient, chunk": 8, "keys' gradient, path": 8}


class Chunk:
    """Drawn queries, keys, values and gradients of one chunk of the plan, and what the kernels make of them."""

    def __init__(self, tree: Any, chunk: Any, heads: tuple[int, int], width: int, device: torch.device) -> None:
        placed = layout(chunk, None, 0)
        self.ends, self.depths = placed.ends, tree.token_depth[placed.tokens]
        self.rows, self.path = len(placed.tokens), chunk.path_tokens
        self.own = int((self.ends - np.arange(self.rows)).sum())
        generator = torch.Generator(device).manual_seed(self.rows)

        def drawn(count: int, rows: int) -> Tensor:
            shape = (1, rows, count, width)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

        self.q, self.grad = drawn(heads[0], self.rows), drawn(heads[0], self.rows)
        self.k, self.v = drawn(heads[1], self.rows), drawn(heads[1], self.rows)
        self.path_k, self.path_v = (drawn(heads[1], max(1, self.path)) for _ in range(2))
        self.out, self.lse = interval_kernels._outputs(self.q)
        self.deltas = torch.empty_like(self.lse)
        self.grad_q, *self.grads = interval_kernels._gradients(self.q, self.k, self.v)
        self.path_grads = interval_kernels._gradients(self.q, self.path_k, self.path_v)[1:]
        for x in (*self.grads, *self.path_grads):
            x.zero_()
        self._device, self._lists = device, dict[tuple[str, Shape], list[Tensor]]()

    def pairs(self, kernel: str) -> int:
        path = self.rows * self.path
        return {"chunk": self.own, "path": path}.get(kernel.split(", ")[-1], self.own + path)

    def listed(self, kernel: str, shape: Shape) -> list[Tensor]:
        """Depths, ends, and bounds and indices of the blocks that this kernel visits."""
        key = (kernel[0], shape)
        if key not in self._lists:
            found = intervals(self.ends, self.depths, self.path, None, Blocks(shape, shape, shape, True))
            at = {"f": 2, "q": 4, "k": 6}[kernel[0]]
            both = [*found[:2], *found[at : at + 2]]
            self._lists[key] = [torch.from_numpy(x).to(self._device) for x in both]
        return self._lists[key]

    def run(self, kernel: str, shape: Shape) -> None:
        """One launch."""
        kernels, strides = interval_kernels, interval_kernels._strides
        q, k, v, path_k, path_v, grad = self.q, self.k, self.v, self.path_k, self.path_v, self.grad
        depths, ends, bounds, blocks = self.listed(kernel, shape)
        constants = kernels._constants(q, k, list(shape), q.shape[-1] ** -0.5, 0, 0.0)
        by_rows = (triton.cdiv(self.rows, shape.rows), q.shape[1])
        if kernel == "forward":
            kernels._forward_kernel[by_rows](
                q, k, v, path_k, path_v, self.lse, depths, ends, bounds, blocks, self.out, self.lse,
                self.rows, self.path, *strides(q, k, v, path_k, path_v, self.out), SINKS=False, **constants,
            )  # fmt: skip
        elif kernel == "queries' gradient":
            kernels._query_gradient_kernel[by_rows](
                q, k, v, path_k, path_v, self.out, grad, self.lse, depths, ends, bounds, blocks, self.grad_q,
                self.deltas, self.rows, self.path, *strides(q, k, v, path_k, path_v, self.out, grad, self.grad_q),
                **constants,
            )  # fmt: skip
        elif kernel == "keys' gradient, chunk" or self.path:
            own = kernel == "keys' gradient, chunk"
            keys, values, (to_k, to_v) = (k, v, self.grads) if own else (path_k, path_v, self.path_grads)
            count = self.rows if own else self.path
            kernels._key_gradient_kernel[(triton.cdiv(count, shape.keys), k.shape[1])](
                q, keys, values, grad, self.lse, self.deltas, depths, ends, bounds, blocks, to_k, to_v, self.rows,
                count, *strides(q, keys, values, grad, to_k, to_v), PATH=not own, LISTED=own, COLUMNS=True, **constants,
            )  # fmt: skip

    def results(self, kernel: str, shape: Shape) -> list[Tensor]:
        """Copies of what one launch makes, of buffers that were empty."""
        for x in (*self.grads, *self.path_grads):
            x.zero_()
        self.run(kernel, shape)
        by_kernel = {"forward": [self.out], "queries' gradient": [self.grad_q], "keys' gradient, chunk": self.grads}
        return [x.to(torch.float32, copy=True) for x in by_kernel.get(kernel, self.path_grads)]


def milliseconds(run: Callable[[], object]) -> float:
    """Median of three, after one more."""
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[1:])


def measured(chunks: list[Chunk], kernel: str) -> list[dict[str, Any]]:
    """A row a shape: milliseconds of all chunks and TFLOP/s."""
    rows, first = list[dict[str, Any]](), list[Tensor]()
    heads, width = chunks[0].q.shape[1], chunks[0].q.shape[-1]
    operations = PER_PAIR[kernel] * width * heads * sum(chunk.pairs(kernel) for chunk in chunks)
    chosen: Shape = getattr(blocks_of(chunks[0].q, None), kernel.split("'")[0])
    for shape in SHAPES[kernel]:
        row: dict[str, Any] = {"kernel": kernel, "shape": list(shape), "chosen": shape == chosen}
        try:
            spent = milliseconds(lambda shape=shape: [chunk.run(kernel, shape) for chunk in chunks])
            row |= {"milliseconds": spent, "tflops": operations / spent / 1e9}
            results = [x for chunk in chunks for x in chunk.results(kernel, shape)]
            first = first or results
            off = (float((a - b).norm() / b.norm()) for a, b in zip(results, first) if b.any())
            row["difference"] = max(off, default=0.0)
        except Exception as error:  # a compiler's or a driver's: the next shape may do
            row["error"] = described(error)
        print(row, flush=True)
        rows.append(row)
    return rows


def others(heads: tuple[int, int], width: int, device: torch.device) -> list[dict[str, Any]]:
    """FlashAttention-2 and cuDNN's attention as torch calls them, by themselves."""
    rows = []
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        for what, n, m, causal in (("path", 16_384, 4096, False), ("square", 8192, 8192, True)):
            sizes = ((heads[0], n), (heads[1], m), (heads[1], m))
            q, k, v = (torch.randn(1, h, x, width, device=device, dtype=torch.bfloat16) for h, x in sizes)
            leaves, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)

            def forward(leaves: list[Tensor] = leaves, causal: bool = causal, backend: Any = backend) -> Tensor:
                with sdpa_kernel([backend]):
                    return functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)

            row: dict[str, Any] = {"kernel": name, "what": what}
            try:
                there = milliseconds(forward)
                back = milliseconds(lambda forward=forward, grad=grad: forward().backward(grad)) - there
                operations = width * heads[0] * n * m / (2 if causal else 1)
                row |= {"forward_tflops": 4 * operations / there / 1e9, "backward_tflops": 10 * operations / back / 1e9}
            except RuntimeError as error:
                row["error"] = described(error)
            print(row, flush=True)
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", nargs=2, type=int, default=[16, 8], help="of queries and of keys")
    parser.add_argument("--head", type=int, default=128, help="numbers of a head")
    parser.add_argument("--data", help="token arrays (default: that of ARBORIST_DATA, else synthetic conversations)")
    parser.add_argument("--out", type=Path, help="folder for blocks.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; what Triton makes of the kernels without one: benchmarks.gpu.compiled")
    device, heads = torch.device("cuda"), (args.heads[0], args.heads[1])
    source, recorded = conversations(args.data, False)
    tree = make_case(source, recorded, "turns", 8, 4, VOCABULARY).tree()
    chunks = [Chunk(tree, chunk, heads, args.head, device) for chunk in plan(tree, CHUNK, CHUNK).chunks]
    report: dict[str, Any] = {"environment": environment(device), "conversations": source, "heads": heads}
    report |= {"head": args.head, "chunks": [[x.rows, x.path, x.own] for x in chunks]}
    report["kernels"] = [row for kernel in SHAPES for row in measured(chunks, kernel)]
    report["others"] = others(heads, args.head, device)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "blocks.json", report)
    return int(any("error" in row for row in report["kernels"]))


if __name__ == "__main__":
    sys.exit(main())
