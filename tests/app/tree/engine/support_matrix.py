"""Writes docs/support_matrix.md: which model families the tree engine computes exactly, and which it refuses.

    python -m tests.app.tree.engine.support_matrix

Every cell is what the checks of `tests/app/tree/engine/families` find when this runs: tiny models of each family, in
small chunks with recomputation, against every sequence alone. Tests compare the file with a fresh one.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.app.tree.engine import families
from tests.app.tree.engine.pictures import families as seeing
from tests.app.tree.engine.pictures import others as seen
from tests.app.tree.engine.pictures import vision

DOCUMENT = Path(__file__).parents[4] / "docs" / "support_matrix.md"
EXPLAINED = {
    "float32": f"log-probabilities to {families.FORWARD:.0e} and gradients to {families.BACKWARD:.0e} of the largest"
    f" (both {families.DELTA_RULE[0]:.0e} with a delta rule, {families.UNSCALED[0]:.0e} where scores have no scale;"
    f" gradients of MiniMax-M3 {families.FORWARD:.0e}), or what the dense model's own rounding explains: no further"
    " from the truth than 1.5 times the dense model",
    "bf16": "bf16 parameters: gradients in float32, no further from the truth than "
    f"{families.LOW_PRECISION:g} times what the dense bf16 model is on the same small batch, at the median of a few"
    " models",
    "autocast": "float32 parameters under bf16 autocast, the same",
    "checkpointing": "Hugging Face's gradient checkpointing, enabled by the user",
    "LoRA": "PEFT LoRA on every linear layer of the body",
    "4 bit": "the same LoRA beside linear layers in NF4 (bitsandbytes), against a plain model of the numbers that these"
    " stand for; what `transformers` makes no linear layers of (experts in one tensor, convolutions) stays as it is",
    "tied and untied": "input and output embeddings that share their weight, and that do not",
}


def markdown(sighted: list[str]) -> str:
    """The document, with `pictures()` in it. Raises AssertionError when a family is not what its row says."""
    columns = list(families.COLUMNS)
    lines = [
        "# Model families",
        "",
        "Written by `python -m tests.app.tree.engine.support_matrix`; each cell is a check of a tiny random model of",
        "that family, in small chunks with recomputation, against running every sequence alone. Backend `sdpa`.",
        "",
        f"| family | {' | '.join(columns)} | note |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for row, family in families.SUPPORTED.items():
        cells = [families.cell(row, column) for column in columns]
        lines.append(f"| {row} | {' | '.join(cells)} | {family.note} |")
    lines += ["", *(f"- **{name}**: {EXPLAINED[name]}." for name in columns), *others(), *sighted]
    lines += ["", "## Refused by name", ""]
    lines += ["| family | why | the error |", "|---|---|---|"]
    for row, family in families.REFUSED.items():
        lines.append(f"| {row} | {family.note} | {families.refusal(row)} |")
    lines += [
        "",
        "Refused in training for every family: dropout above 0 (LoRA's too), auxiliary router losses, sequences beyond",
        "`max_position_embeddings`, and any argument of the attention function that is not honoured.",
    ]
    return "\n".join(lines) + "\n"


def others() -> list[str]:
    """The families of which one column is looked at."""
    names = sorted({MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in families.OTHERS}, key=str.lower)
    said = (
        f"{len(names)} more are right in float32, on the tree and in the embedded engine, which is all that is looked"
    )
    said += f" at: {', '.join(names)}."
    return ["", "## Others", "", *textwrap.wrap(said, 120)]


def pictures() -> list[str]:
    """The section on pictures."""
    columns = list(seeing.COLUMNS)
    lines = [
        "",
        "## With pictures",
        "",
        "Vision-language models (`...ForConditionalGeneration`) on sequences with pictures, in small chunks that cut",
        "inside of them, against the untouched model from pixels: language model, projector and tower. Tolerances as",
        "above, in float32 2e-06 of the largest gradient (5e-05 with a delta rule, 2e-05 where scores have no scale).",
        "All train on text alone, too; and in groups of ranks, whole and in shards, but, in shards, for the one with",
        "inputs of each layer's own. Where placeholders see each other, no chunk cuts a picture. All need transformers",
        "5.18 or newer.",
        "",
        f"| family | {' | '.join(columns)} | note |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for row, family in vision.FAMILIES.items():
        cells = [seeing.cell(row, column) for column in columns]
        lines.append(f"| {row} | {' | '.join(cells)} | {family.note} |")
    said = (
        f"{len(seen.OTHERS)} more are right with pictures in float32, on the tree and in the embedded engine, which is"
    )
    said += f" all that is looked at: {', '.join(seen.names())}."
    lines += ["", *textwrap.wrap(said, 120)]
    lines += ["", "| refused | the error |", "|---|---|"]
    lines += [f"| {row} | {seeing.refusal(row)} |" for row in vision.REFUSED]
    return lines + [f"| {seen.class_of(kind)} | {seen.refusal(kind)} |" for kind in seen.REFUSED]


def main() -> None:
    torch.set_num_threads(1)
    DOCUMENT.write_text(markdown(pictures()))


if __name__ == "__main__":
    main()
