"""How far apart sampler and trainer are in models of experts, when the trainer chooses experts itself and when it sends
tokens where the sampler did; and what that costs.

    python -m benchmarks.rollouts.experts                          # a few minutes on a CPU
    python -m benchmarks.rollouts.experts --seeds 1 --requests 4 --layers 3 --repeats 1 --out DIR

Models of random weights (64 experts, 8 of them a token). The embedded engine samples in bfloat16; the trainer has the
same weights in float32 and in bfloat16, by other attention and products than the engine's, as between any two programs,
and in float32 after its routers moved by 1%, as between two versions of a policy. Of the sampled tokens: differences of
log-probabilities in nats; k3, mean of exp(d) - d - 1, which estimates the divergence; `experts`: of all choices those
that the trainer's router makes otherwise. Backward passes with and without records take turns: CPU seconds, medians.
Writes experts.json and experts.md.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from app.tree import PrefixTree, TreeEngine, routed
from benchmarks.common.measure import environment
from benchmarks.common.records import write_json
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationRequest, GenerationResponse

VOCABULARY, PROMPT, REPLY = 512, 16, 48
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    initializer_range=0.1,
    num_experts=64,
    num_local_experts=64,
    n_routed_experts=64,
    num_experts_per_tok=8,
    moe_intermediate_size=64,
    first_k_dense_replace=1,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
FAMILIES = {"Qwen3-MoE": "qwen3_moe", "GLM-4-MoE": "glm4_moe", "GPT-OSS": "gpt_oss"}
"""A softmax before the choice, sigmoids with a bias, and a softmax behind it."""


def policy(kind: str, layers: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**SHAPE, num_hidden_layers=layers)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


@dataclass
class Sampled:
    """Whole sequences, where each reply begins, the sampler's log-probabilities of replies, and records of experts."""

    sequences: list[np.ndarray]
    logprobs: list[torch.Tensor]
    rows: np.ndarray
    table: np.ndarray

    def tree(self, records: bool) -> PrefixTree:
        tree = PrefixTree.build(self.sequences)
        return routed(tree, self.rows, self.table) if records else tree


def sample(model: PreTrainedModel, requests: int, seed: int) -> Sampled:
    """Replies to prompts, two to each."""
    engine = EmbeddedEngine(kv_cache_tokens=requests * 128, dtype="bfloat16", record_experts=True, num_threads=1)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, PROMPT).tolist() for _ in range(requests // 2)]
    asked = [GenerationRequest(prompt, REPLY, experts_from=0) for prompt in prompts for _ in range(2)]

    async def all_of_them() -> list[GenerationResponse]:
        return list(await asyncio.gather(*(engine.generate(one) for one in asked)))

    engine.start(model, version=0, seed=seed)
    try:
        answers = asyncio.run(all_of_them())
    finally:
        engine.close()
    sequences = [np.array([*one.tokens, *got.tokens]) for one, got in zip(asked, answers, strict=True)]
    rows, tables, count = [], [], 0
    for sequence, got in zip(sequences, answers, strict=True):
        assert got.experts is not None
        known = len(got.experts)
        rows += [*range(count, count + known), *[-1] * (len(sequence) - known)]
        tables.append(got.experts.numpy())
        count += known
    logprobs = [torch.tensor(got.logprobs) for got in answers]
    return Sampled(sequences, logprobs, np.array(rows), np.concatenate(tables))


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """Its routers by 1% of their size."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter += 0.01 * parameter.std() * torch.randn_like(parameter)
    return other


TRAINERS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "float32": lambda model: model,
    "bfloat16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "float32, routers moved": moved,
}


def apart(trainer: PreTrainedModel, sampled: Sampled, records: bool) -> dict[str, float]:
    """Of all sampled tokens, trainer's log-probabilities less the sampler's."""
    engine, tree = TreeEngine(trainer, self_check=False), sampled.tree(records)
    found = engine.forward(tree).logprobs
    pairs = zip(found, sampled.logprobs, strict=True)
    difference = torch.cat([got[-len(own) :].float() - own for got, own in pairs]).double()
    row = {
        "mean": float(difference.abs().mean()),
        "p99": float(difference.abs().quantile(0.99)),
        "max": float(difference.abs().max()),
        "k3": float((difference.exp() - difference - 1).mean()),
    }
    if records:  # counted in passes that train
        engine.backward(tree, lambda out, _: out.logprobs.sum())
        trainer.zero_grad()
        replayed, changed = map(float, engine.replay.take_counts())
        row["experts"] = changed / replayed
    return row


def cost(trainer: PreTrainedModel, sampled: Sampled, repeats: int) -> float:
    """CPU seconds of a backward pass with records over those of one without: medians of passes that take turns."""
    engine = TreeEngine(trainer, self_check=False)
    trees = {records: sampled.tree(records) for records in (False, True)}
    spent: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for records, tree in trees.items():
            began = time.process_time()
            engine.backward(tree, lambda out, _: out.logprobs.sum())
            if repeat:  # the first makes gradients
                spent[records].append(time.process_time() - began)
    return median(spent[True]) / median(spent[False])


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Experts that the sampler chose",
        "",
        f"`{result['command']}`: models of random weights with {result['layers']} layers and 64 experts, 8 of them a"
        " token. The embedded engine samples in bfloat16; the trainer has the same weights, or routers that moved by 1%"
        " since. *experts*: choices that the trainer's router makes otherwise. The rest, without records and with:"
        " differences of sampled tokens' log-probabilities in nats, and k3, which estimates the divergence. Medians of"
        f" {result['seeds']} models, {result['tokens']:,} sampled tokens of each; one CPU thread.",
        "",
        "| family | trainer | experts | mean | 99% | largest | k3 | k3, without / with |",
        "|" + "---|" * 8,
    ]
    for row in result["rows"]:
        off, on = row["without"], row["with"]
        cells = [f"{off[name]:.4f}, {on[name]:.4f}" for name in ("mean", "p99", "max")]
        cells = [f"{100 * on['experts']:.2f}%", *cells, f"{off['k3']:.1e}, {on['k3']:.1e}"]
        lines.append(f"| {row['family']} | {row['trainer']} | {' | '.join(cells)} | {off['k3'] / on['k3']:.1f} |")
    costs = ", ".join(f"{name} {value:.3f}" for name, value in result["cost"].items())
    lines += ["", f"A backward pass with records over one without, CPU seconds: {costs}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts.experts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="models of each family")
    parser.add_argument("--requests", type=int, default=32, help="replies of each model")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=7, help="backward passes of each kind that are timed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    costs: dict[str, float] = {}
    for family, kind in FAMILIES.items():
        for seed in range(args.seeds):
            model = policy(kind, args.layers, seed)
            sampled = sample(model, args.requests, seed)
            for trainer, make in TRAINERS.items():
                made = make(model)
                for records in (False, True):
                    key = (family, trainer, "with" if records else "without")
                    found.setdefault(key, []).append(apart(made, sampled, records))
            print(f"{family}: model {seed + 1} of {args.seeds}", flush=True)
        costs[family] = cost(model, sampled, args.repeats)
    rows = [
        {"family": family, "trainer": trainer}
        | {
            way: {
                name: median(one[name] for one in found[family, trainer, way])
                for name in found[family, trainer, way][0]
            }
            for way in ("without", "with")
        }
        for family in FAMILIES
        for trainer in TRAINERS
    ]
    given = [
        f"--{name} {value}" for name, value in vars(args).items() if name != "out" and value != parser.get_default(name)
    ]
    result = {
        "command": " ".join(["python -m benchmarks.rollouts.experts", *given]),
        "date": datetime.now(UTC).date().isoformat(),
        "environment": environment(torch.device("cpu")),
        "layers": args.layers,
        "seeds": args.seeds,
        "tokens": args.requests * REPLY,
        "rows": rows,
        "cost": costs,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "experts.json", result)
    (args.out / "experts.md").write_text(markdown(result))


if __name__ == "__main__":
    main()
