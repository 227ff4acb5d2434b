"""One recording of an agent, trained as a tree and as rows: equal gradients, and what either costs.

    python -m benchmarks.tree.two_ways --out benchmarks/results/tree        # minutes

An agent of the `openai` package (`recorded_agent.solve`: thoughts that its template drops, a sub-agent, a compaction)
talks through the gateway to an engine that says sentences drawn from a seed; its calls are recorded as a run records
them. The recording is then computed in float64 row by row, without rows that others begin with (`tree_training_mode:
disabled` is that), and as one tree. The model is a GPT-NeoX, whose layers know no float32 (RMSNorm does). Writes
two_ways.json, .md and .png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.batch import Trajectory
from benchmarks.common.measure import environment
from benchmarks.common.models import build_model, describe
from benchmarks.common.records import write_json
from benchmarks.common.systems import Settings, gradient_error, gradients, make_systems
from benchmarks.common.workloads import Case, recorded_case
from callbacks import figures
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.rewards.options import Judgement
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import AgentWorkflow

_VOCABULARY = 256  # characters, and what ends a reply
_SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_TOY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_SENTENCE = "the crane lifts a crate of figs while rain keeps the pilot ashore and nobody minds the tide"
_WORDS = tuple(_SENTENCE.split())
_TEMPLATE = """{%- set n = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set n.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.index0 < n.asked -%}
{{ '@assistant\\n' + (m.content.split('</think>')[-1] | trim) + '<eos>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '@assistant\\n' + m.content + '<eos>\\n' }}
{%- else -%}
{{ '@' + m.role + '\\n' + m.content + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '@assistant\\n' }}{%- endif -%}"""  # as Qwen3's: earlier thoughts are dropped


class DrawnEngine:
    """Thinks, and says something; log-probabilities mean nothing."""

    version, max_context = 0, 65_536

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.vocab_size = len(tokenizer)
        self._tokenizer = tokenizer
        self._draw = random.Random(seed)

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        thought, said = (" ".join(self._draw.choices(_WORDS, k=count)) for count in (40, 20))
        tokens = self._tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{said}", add_special_tokens=False)
        tokens = [*tokens, self._tokenizer.eos_token_id]
        return GenerationResponse(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")


def record(directory: Path, seed: int = 0) -> list[Trajectory]:
    """Plays one episode and writes it, as `RolloutDataModule(record=...)` does."""
    tokenizer = load_tokenizer("char:" + string.printable.strip() + " \n")
    tokenizer.chat_template = _TEMPLATE
    workflow = AgentWorkflow("benchmarks.tree.recorded_agent.solve", max_new_tokens=4096, workers=1)
    workflow.prepare(tokenizer)

    async def play() -> list[Trajectory]:
        async def good(prompt: Prompt, completion: str) -> Judgement:
            return Judgement(1.0)

        drawn: Any = DrawnEngine(tokenizer, seed)
        engine = EpisodeEngine(drawn, tokenizer, good, name="episode", seed="0")
        async with asyncio.timeout(300):
            return await workflow.run(engine, Prompt(id="harbour", text="Two ships wait. Which comes first?"))

    try:
        found = asyncio.run(play())
    finally:
        workflow.close()
    RolloutRecorder(directory).write(0, [Group(0, "harbour", 0, found)])
    return found


def compare(case: Case, model: Any, repeats: int) -> list[dict[str, Any]]:
    """A row a system: tokens, FLOPs, CPU seconds (the median) and the largest difference to rows' gradients."""
    chosen = [one for one in make_systems(model, case, Settings()) if one.name in ("dense", "dense-leaf", "ours")]
    seconds: dict[str, list[float]] = {one.name: [] for one in chosen}
    found: dict[str, Any] = {}
    for repeat in range(repeats):
        for k in range(len(chosen)):
            one = chosen[(k + repeat) % len(chosen)]
            began = time.process_time()
            found[one.name] = gradients(model, one)
            seconds[one.name].append(time.process_time() - began)
    return [
        {
            "way": one.name,
            "tokens": one.tokens,
            "flops": one.flops,
            "cpu_seconds": sorted(seconds[one.name])[repeats // 2],
            **{f"error_{key}": value for key, value in gradient_error(found[one.name], found["dense"]).items()},
        }
        for one in chosen
    ]


def markdown(report: dict[str, Any]) -> str:
    names = {"dense": "rows", "dense-leaf": "rows that no other extends (`disabled`)", "ours": "tree"}
    best = report["rows"][-1]
    lines = [
        "# One recording, two ways",
        "",
        f"`{report['command']}`; torch {report['environment']['torch']}, {report['environment']['device']}, one thread."
        f" An agent of the `openai` package: {report['calls']} calls, thoughts that the template drops, a sub-agent and"
        f" a compaction; {report['sampled']:,} tokens were sampled, and each is trained once. Replies that a later"
        f" prompt showed otherwise: {report['drift']}. float64, random weights; seconds are the CPU's, medians of"
        f" {report['repeats']}. Gradients are compared with those of the rows: the largest difference over the largest"
        " gradient.",
        "",
        "| trained as | tokens | of tree | TFLOP | of tree | CPU s | of tree | gradients differ by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        values = [f"{row['tokens']:,}", f"{row['tokens'] / best['tokens']:.2f}"]
        values += [f"{row['flops'] / 1e12:.3f}", f"{row['flops'] / best['flops']:.2f}"]
        values += [f"{row['cpu_seconds']:.1f}", f"{row['cpu_seconds'] / best['cpu_seconds']:.2f}"]
        lines.append(f"| {names[row['way']]} | {' | '.join(values)} | {row['error_largest']:.1e} |")
    return "\n".join([*lines, "", "![the tree of the recording](two_ways.png)", ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--toy", action="store_true", help="a model of seconds")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        played = record(Path(scratch))
        case = recorded_case(Path(scratch), None, _VOCABULARY)
        fields = {"model_type": "gpt_neox", "vocab_size": _VOCABULARY, "max_position_embeddings": 8192}
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(fields | (_TOY if args.toy else _SHAPE)))
        model = build_model(str(config), dtype=torch.float64)
    drift = {name: count for name, count in played[0].metadata.items() if name.startswith("drift_")}
    report = {
        "command": f"python -m benchmarks.tree.two_ways --repeats {args.repeats}" + " --toy" * args.toy,
        "environment": environment(torch.device("cpu")),
        "model": describe(model, "float64"),
        "repeats": args.repeats,
        "calls": len(played),
        "sampled": sum(int(one.loss_mask.sum()) for one in played),
        "drift": ", ".join(f"{name.removeprefix('drift_')} {count}" for name, count in drift.items()) or "nothing",
        "rows": compare(case, model, args.repeats),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "two_ways.json", report)
    (args.out / "two_ways.md").write_text(markdown(report))
    figures.prefix_tree(case.tree(), "an agent's calls, one episode").savefig(args.out / "two_ways.png")
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
