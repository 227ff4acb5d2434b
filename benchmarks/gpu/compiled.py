"""What Triton makes of the attention kernels for a GPU that is not here: registers, spills, shared memory, inner loops.

    python -m benchmarks.gpu.compiled [--capability 9.0 8.6] [--heads 64 128 256] [--out benchmarks/results/gpu]

Promises: the blocks are those that the backend chooses for such a GPU; an instruction counts once for each warp that
issues it, so figures are comparable between blocks, over 64 queries by 64 keys; `at most` is the share of the matrix
units' rate that no kernel exceeds which has these instructions, from a multiprocessor's four issued a cycle: a bound,
not a measurement, since waiting is not in it. Exits 1 where a kernel takes more shared memory than a block may have.
Needs Triton alone (CUDA's assembler and disassembler are in it), no GPU; a minute for two capabilities.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from app.tree.attention import interval, interval_kernels

SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
"""KiB of shared memory that a block may have, by compute capability; of others, 99."""
MATRIX = {8: 2048, 9: 4096, 10: 8192}
"""Operations of bfloat16 a cycle and multiprocessor on the matrix units (A100: 312 TFLOP/s of 108 at 1.41 GHz; H100:
989 of 132 at 1.83; B200: 2,250 of 148 at 1.85), by the first number of the compute capability."""
KERNELS: dict[str, tuple[Any, int, dict[str, bool]]] = {
    "forward": (interval_kernels._forward_kernel, 2, {"SINKS": False}),
    "queries' gradient": (interval_kernels._query_gradient_kernel, 3, {}),
    "keys' gradient, chunk": (interval_kernels._key_gradient_kernel, 4, {"PATH": False, "LISTED": True}),
    "keys' gradient, path": (interval_kernels._key_gradient_kernel, 4, {"PATH": True, "LISTED": False}),
}
"""Kernel, its matrix products of a block, and what else it is compiled for."""
_TURNED = re.compile(r"tt\.trans .*#mma.* ->")
TYPES = dict.fromkeys(("lse", "deltas", "grad_k", "grad_v"), "*fp32")
TYPES |= dict.fromkeys(("depths", "ends", "bounds", "blocks"), "*i32")


def compiled(
    name: str, head: int, capability: tuple[int, int], window: int = 0, softcap: float = 0.0
) -> dict[str, Any]:
    """One kernel in bfloat16, two query heads to a key head: what it takes, and instructions of its loops."""
    kernel, products, more = KERNELS[name]
    blocks = interval.fitting(head, capability, window or None)
    rows, keys, warps, stages = {"f": blocks.forward, "q": blocks.queries, "k": blocks.keys}[name[0]]
    given = {"SCALE": 0.1, "UNIT": 1.44 if softcap else 0.144, "SOFTCAP": softcap, "WINDOW": window, "GROUPS": 2}
    given |= {"HEAD": head, "WIDTH": max(16, triton.next_power_of_2(head)), "ROWS": rows, "KEYS": keys}
    given |= {"MULTIPLIED": tl.bfloat16, "SUM": tl.float32, **more}
    if name.startswith("keys"):
        given["COLUMNS"] = blocks.columns
    if window and name.endswith("path"):
        given["LISTED"] = True
    signature, aligned = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        step = argument.endswith(("_head", "_row"))
        number = step or argument in ("rows", "path", "keys")
        kind = "constexpr" if argument in given else "i32" if number else TYPES.get(argument, "*bf16")
        signature[argument] = kind
        if step or kind.startswith("*"):  # as Triton finds them when it is called with tensors of whole heads
            aligned[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    source = ASTSource(kernel, signature, given, aligned)
    found = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(found.asm["cubin"])
        used = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", str(binary)))
        loops = list(_loops(_tool("nvdisasm", "-c", str(binary))))
    if capability[0] == 9 and _TURNED.search(found.asm["ttgir"]):
        raise RuntimeError(f"{name}: transposes the result of a product, of which Triton 3.4 to 3.7.0 makes wrong code")
    assert used is not None and loops, "cuobjdump and nvdisasm told nothing of it"
    issued = [sum(loop.values()) * warps * 64 * 64 / (rows * keys) for loop in loops]
    first = 1 if window and name in ("forward", "queries' gradient") else 0  # before it a window's loop over the path
    matrix = products * 2 * 64 * 64 * given["WIDTH"] / MATRIX[capability[0]]  # cycles
    return {
        "kernel": name,
        "capability": ".".join(map(str, capability)),
        "head": head,
        "blocks": f"{rows} x {keys}, {warps} warps",
        "registers": int(used[1]),
        "spilled": loops[first]["LDL"] + loops[first]["STL"],
        "shared": found.metadata.shared / 1024,
        "limit": SHARED.get(capability, 99),
        "whole": issued[first],
        "masked": issued[first + 1],
        "at_most": matrix / max(matrix, issued[first] / 4),
    }


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


def _loops(disassembled: str) -> Iterator[Counter[str]]:
    """Instructions by name of every loop that has matrix products, in the order of their ends."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in disassembled.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                body = instructions[labels[back[1]] :]
                names = Counter(re.sub(r"^@!?U?P\d\s+", "", x).split()[0].split(".")[0] for x in body)
                if any("MMA" in name for name in names):
                    yield names


def page(rows: list[dict[str, Any]]) -> str:
    """A markdown table."""
    columns = ["compute capability", "head", "kernel", "block", "registers", "spilled in its loop"]
    columns += ["shared memory, KiB", "whole", "masked", "at most"]
    lines = [
        f"Triton {triton.__version__}, bfloat16, two query heads to a key head. `whole`, `masked`: instructions issued",
        "for 64 queries by 64 keys where all see all, and where the mask is looked at; `at most`: the share of the",
        "matrix units' rate that the former leave room for. Made by `python -m benchmarks.gpu.compiled`.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for row in rows:
        lines.append(
            f"| {row['capability']} | {row['head']} | {row['kernel']} | {row['blocks']} | {row['registers']} |"
            f" {row['spilled']} | {row['shared']:.0f} of {row['limit']} | {row['whole']:,.0f} | {row['masked']:,.0f} |"
            f" {row['at_most']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--capability", nargs="+", default=["9.0", "8.6"], help="compute capabilities, as 9.0")
    parser.add_argument("--heads", nargs="+", type=int, default=[64, 128, 256], help="head sizes")
    parser.add_argument("--window", type=int, default=0, help="of sliding-window layers; 0: none")
    parser.add_argument("--softcap", type=float, default=0.0, help="of soft-capped scores; 0: none")
    parser.add_argument("--out", type=Path, help="folder for compiled.md")
    args = parser.parse_args(argv)
    rows = []
    for text in args.capability:
        major, minor = map(int, text.split("."))
        for head in args.heads:
            for name in KERNELS:
                rows.append(compiled(name, head, (major, minor), args.window, args.softcap))
                print(page(rows).splitlines()[-1], flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "compiled.md").write_text(page(rows))
    return int(any(row["shared"] > row["limit"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
