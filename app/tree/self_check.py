"""The first-use self-check: a small part of the first batch runs over its tree and densely, and has to agree.

Promises: outputs and the gradient of every trainable parameter are compared; the model, its gradients and the global
random state are left as found; memory beyond that of one small step is a few numbers a parameter. What is allowed is
measured: the dense model against itself with the output of every layer moved by one rounding step of its dtype (in low
precision three times, of which the largest difference counts), times a margin. So a bf16 model may differ by bf16's
rounding and no more. What passes wrongly is a mistake no larger than rounding, which no comparison in that dtype could
tell from it.

How small: a few sequences around one fork of the batch's tree, some tokens to either side of it (`EXTENT`, and of large
models `EXTENT_LARGE`, for the check costs what its tokens and every parameter of each of its passes do), in chunks of a
quarter of that, so that paths, siblings, retained and repeated chunks all occur; the loss needs `SCORED` tokens right
after the fork and a few before. Of batches with pictures, what `app.tree.model.picture_check` samples. Of every
parameter's gradient at most `SAMPLED` entries, spread evenly (of embeddings: in the rows of the sampled tokens), are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from app.tree.experts.replay import Replay
from app.tree.heads.outputs import BatchedLoss, FlatOutputs
from app.tree.model.picture_check import Entries, Sample, by_token, differences, entering, picture_sample
from app.tree.model.pictures import Tower
from app.tree.model.projections import READS
from app.tree.model.quantised import elements
from app.tree.prefix_tree import Bools, Ints, PrefixTree

Budgets = tuple[int, int]
"""Chunk and live tokens."""

SCORED, SAMPLED = 24, 4096
EXTENT, EXTENT_LARGE, LARGE = (4, 48), (3, 16), 2**26
"""Sequences, and tokens before and after the fork; of models of more than `LARGE` parameters."""
MARGIN, MARGIN_LOW, PERTURBATIONS, ATTEMPTS = 30.0, 3.0, 3, 3
"""How many times dense's own rounding error is allowed, in full and in low precision (autocast too), where that error
is the largest of three. Two ways to compute the same differ by about as much as one does from itself: in bf16 0.1 to
1.2 times over the families of the support matrix on a CPU, and kernels of other devices, which round at other places,
have as much room again. Mistakes are 1e5 times as large in float32, where long sums are given room. In bf16 they are
up to 100 times, and a weak one (1.6 to 5.6 times was seen) may be missed."""
SCAN = 1e-3
"""Difference of a gradient, relative to its size, that is allowed on top where layers run scans. What a scan rounds
inside (a delta rule solves a triangular system) is not seen by moving what layers say; a lost state is 0.1 and more."""
FLOOR = 1e-3
"""Of the root mean square gradient over all parameters: a parameter whose gradient is smaller is compared with this."""


class SelfCheckError(RuntimeError):
    """Tree and dense execution of this model differ by more than rounding."""


@dataclass(frozen=True)
class CheckReport:
    """What the self-check found.

    Attributes:
        sequences, tokens: of the sample.
        outputs: largest difference of an output between tree and dense execution, and of dense from itself under
            rounding.
        gradients: difference of a parameter's gradient, relative to its size, and dense's own; of the parameter that is
            furthest beyond (or nearest to) what is allowed.
        parameter, layer: that parameter's name, and the type of the module that owns it.
        margin: how many times dense's own difference is allowed.
        passed: whether everything is within that.
        low_precision: whether the model computes in less than 32 bits.
        heads: whether already dense execution gives other log-probabilities than the model's own forward.
        pictures: what enters the language model otherwise than the untouched model has it, in words.
        scope: which part of the model was compared, in words; empty: all of it.
    """

    sequences: int
    tokens: int
    outputs: tuple[float, float]
    gradients: tuple[float, float]
    parameter: str
    layer: str
    margin: float
    passed: bool
    low_precision: bool
    heads: bool = False
    pictures: str = ""
    scope: str = ""

    def __str__(self) -> str:
        verdict = "agree" if self.passed else "differ by more than rounding"
        found = f"; of what enters the language model, {self.pictures}" if self.pictures else ""
        return (
            f"tree and dense execution {verdict} on {self.sequences} sampled sequences of {self.tokens} tokens"
            f"{self.scope}: outputs differ by {self.outputs[0]:.1e} (dense from itself under rounding:"
            f" {self.outputs[1]:.1e}), the gradient of '{self.parameter}' ({self.layer}) by {self.gradients[0]:.1e} of"
            f" its size (dense from itself: {self.gradients[1]:.1e}); allowed is {self.margin:g} times as much as dense"
            f" from itself{found}"
        )

    @property
    def cause(self) -> str:
        """Of a check that failed: what is meant, and what to do."""
        if self.heads:
            return (
                "Its own forward makes other logits of the last hidden states than its output projection and what the"
                " engine reads of its configuration (logits_scaling, logit_scale, lm_head_multiplier,"
                " final_logit_softcapping) do, which no way to run it repairs; use another model"
            )
        if self.pictures:
            found = "The engine gives the model its pictures otherwise than the model itself does"
        else:
            found = "Some layer mixes tokens past the attention the engine controls"
        return (
            f"{found}; train it with on_mismatch='fallback' (every sequence alone), or set self_check=False if you know"
            " better"
        )


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
        model, value_head, temperature: the engine's.
        run: `run(tree, loss, budgets)` accumulates gradients, over the tree within budgets or, with None, densely.
        scans: some layers run a scan, whose own rounding `SCAN` allows.
        total: where ranks run a tree together, makes what each has of a gradient their sum, in place.
        tower: what the model makes pictures' features with.
        entries: what enters the language model for each sequence of a tree, by token; of this rank's share of it.
        replay: of batches with recorded experts: some are made up for the sample, and all ways to run it replay them.
    """

    model: PreTrainedModel
    value_head: nn.Module | None
    temperature: float
    tower: Tower
    run: Callable[[PrefixTree, BatchedLoss, Budgets | None], None]
    scans: bool = False
    total: Callable[[Tensor], None] | None = None
    entries: Callable[[PrefixTree], list[Entries]] | None = None
    replay: Replay | None = None

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module in (self.model, self.value_head) if module is not None]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, tied ones once."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        known = {id(p) for p in named.values()}
        if self.value_head is not None:
            head = {f"value_head.{n}": p for n, p in self.value_head.named_parameters() if p.requires_grad}
            named |= {n: p for n, p in head.items() if id(p) not in known}
        return named

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        parameter = next(self.model.parameters())
        device = parameter.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype

    @property
    def low_precision(self) -> bool:
        return torch.finfo(self.dtype).bits < 32

    @property
    def extent(self) -> tuple[int, int]:
        """Of the sample, by the size of the model."""
        parameters = sum(elements(p) for module in self.modules for p in module.parameters())
        return EXTENT if parameters <= LARGE else EXTENT_LARGE

    def owner(self, parameter: str) -> str:
        """The type of the module that owns a parameter."""
        module, _, _ = parameter.rpartition(".")
        if module.startswith("value_head") and self.value_head is not None:
            return type(self.value_head).__name__
        return type(self.model.get_submodule(module)).__name__


def compare(subject: Subject, tree: PrefixTree, want: frozenset[str]) -> CheckReport | None:
    """Compares tree with dense execution on a sample of `tree`. None when there is nothing to compare.

    A mismatch is looked at again with the sample's token ids permuted: experts that change places for rounding's sake
    do so on some tokens, a mistake shows on all. The report is that of the first attempt within bounds, or of the last.

    Args:
        want: outputs that losses will use; the sample's loss weights all of them at random.
    """
    found = picture_sample(tree, subject.tower.placeholder) if tree.pictures else None
    if found is None:
        sequences, fork = sample(tree, *subject.extent)
        found = Sample(sequences, [_around(fork, len(s)) for s in sequences])
    trainable = any(p.requires_grad for module in subject.modules for p in module.parameters())
    if not found.sequences or max(map(len, found.sequences)) < 2 or not trainable:
        return None
    report = None
    for attempt in range(ATTEMPTS):
        report = _attempt(subject, found.permuted(attempt), want)
        if report.passed or report.pictures:
            break
    return report


def _around(fork: int, length: int) -> Bools:
    """Which positions of a sequence the loss needs."""
    positions = np.arange(length)
    return (positions >= max(1, fork - SCORED // 4)) & (positions < fork + SCORED)


def _attempt(subject: Subject, sampled: Sample, want: frozenset[str]) -> CheckReport:
    built = sampled.tree()
    small = built if subject.replay is None else subject.replay.invented(built)
    ids = np.unique(np.concatenate(sampled.sequences))
    least = subject.tower.least_chunk(small)
    over_tree = (max(least, small.num_tokens // 4), max(least, small.num_tokens // 2))
    own_logprobs, own_entries = _models_own(subject, sampled, small, "logprobs" in want)
    chosen = {name: _chosen(p, ids, subject) for name, p in subject.parameters.items()}
    runs: list[tuple[Tensor, dict[str, Tensor]]] = []
    device = next(subject.model.parameters()).device
    before = _random_state(device)
    perturbations = PERTURBATIONS if subject.low_precision else 1
    for budgets, seed in ((over_tree, None), (None, None), *((None, k + 1) for k in range(perturbations))):
        moved = nullcontext() if seed is None else _moved_by_rounding(subject, seed)
        with moved, _sampled_gradients(subject, chosen) as gradients:
            runs.append((_run(subject, small, want, budgets), gradients))
    if not all(map(torch.equal, before, _random_state(device))):  # by the model, or by another thread

        def dense_again() -> Tensor:
            with _sampled_gradients(subject, chosen):
                return _run(subject, small, want, None)

        _refuse_noise(subject, dense_again)
    if subject.total is not None:
        for gradient in runs[0][1].values():
            subject.total(gradient)
    (over, over_grads), (dense, dense_grads), *rounded = runs
    difference, heads = over - dense, 0.0
    if "logprobs" in want:  # not even the engine's output projection is taken on trust
        column = _column("logprobs", want, own_logprobs)
        own = own_logprobs * torch.from_numpy(np.concatenate(sampled.scored))
        difference[column] = over[column] - own
        heads = float((dense[column] - own).abs().max())
    outputs = (float(difference.abs().max()), max(float((out - dense).abs().max()) for out, _ in rounded))
    others = [grads for _, grads in rounded]
    report = _report(subject, sampled.sequences, outputs, heads, over_grads, dense_grads, others)
    if not own_entries or subject.entries is None:
        return report
    apart = differences(own_entries, subject.entries(small), torch.finfo(subject.dtype).eps)
    if subject.total is not None:  # one decision for all
        subject.total(found := torch.tensor(float(bool(apart)), dtype=torch.float64))
        apart = apart or ("what another rank of the group was given differs from the model's own" if found else "")
    return replace(report, pictures=apart, passed=report.passed and not apart)


def _refuse_noise(subject: Subject, run: Callable[[], Tensor]) -> None:
    """Raises ValueError where what `run` gives depends on torch's random state: what is measured as the model's
    rounding would be noise, and a token's runs would not be of one function."""
    device = next(subject.model.parameters()).device

    def seeded(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return run()

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        once, again, other = seeded(0), seeded(0), seeded(1)
    if float((other - once).abs().max()) > 10 * float((again - once).abs().max()):
        raise ValueError(
            f"{type(subject.model).__name__} draws random numbers in its forward (a router's noise, layers left out),"
            " so that a token's runs would differ; call eval(), or set that to 0 in the model's configuration"
        )


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def sample(tree: PrefixTree, branches: int = EXTENT[0], context: int = EXTENT[1]) -> tuple[list[Ints], int]:
    """Token ids of up to `branches` sequences through the fork with most tokens right below it, cut to `context` tokens
    before and after the fork, and the position of the fork in them; without a fork, the beginnings of two sequences."""
    if not tree.num_sequences:
        return [], 0
    below = np.bincount(tree.segment_parent + 1, np.minimum(tree.segment_length, context), tree.num_segments + 1)
    below[np.bincount(tree.segment_parent + 1, minlength=tree.num_segments + 1) < 2] = 0
    fork = int(below[1:].argmax())
    if not below[1 + fork]:
        return [tree.tokens[tree.sequence_tokens([i])[: 2 * context]] for i in tree.leaf_sequences[:2]], 0
    depth = int(tree.segment_start[fork] + tree.segment_length[fork])
    children = np.flatnonzero(tree.segment_parent == fork)
    largest = children[np.argsort(-tree.segment_length[children], kind="stable")][: branches - 1]
    segment = tree.sequence_segment[tree.sorted_sequences]
    inside = [np.flatnonzero((segment >= c) & (segment < tree.segment_end[c])) for c in largest]
    places = [int(found[0]) for found in inside] + [int(inside[0][-1])]
    start = max(0, depth - context)
    chosen = [
        tree.tokens[tree.sequence_tokens([tree.sorted_sequences[place]])[start : depth + context]]
        for place in dict.fromkeys(places)
    ]
    return chosen, depth - start


def _run(subject: Subject, tree: PrefixTree, want: frozenset[str], budgets: Budgets | None) -> Tensor:
    """Outputs of all sequences, one after the other, of one backward pass under a random linear loss."""
    generator = torch.Generator().manual_seed(0)
    total = tree.num_dense_tokens
    weights = {name: torch.randn(total, generator=generator) / total**0.5 for name in sorted(want)}
    starts = np.concatenate([[0], np.cumsum(tree.sequence_length)])
    seen = {name: torch.zeros(total, dtype=torch.float64) for name in sorted(want)}

    def loss(out: FlatOutputs, indices: Tensor) -> Tensor:
        places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in indices.tolist()])
        terms = []
        for name, weight in weights.items():
            values: Tensor = getattr(out, name)
            seen[name][places] = values.detach().cpu().double()
            terms.append((values * weight[places].to(values)).sum())
        return torch.stack(terms).sum()

    subject.run(tree, loss, budgets)
    return torch.cat(list(seen.values()))


@torch.no_grad()
def _models_own(subject: Subject, sampled: Sample, tree: PrefixTree, logprobs: bool) -> tuple[Tensor, list[Entries]]:
    """Log-probabilities by the model's own forward, float64 [sum of L_i] on the CPU, entry 0 of a sequence 0.0 (all,
    unless `logprobs`: reward models have none); and what enters its language model, where there are pictures."""
    device = next(subject.model.parameters()).device
    columns, entries = [], list[Entries]()
    for i, tokens in enumerate(sampled.sequences):
        ids, (pictures, is_row) = torch.from_numpy(tokens).to(device), sampled.seen(i)
        if not (logprobs or pictures):
            columns.append(torch.zeros(len(ids), dtype=torch.float64))
            continue
        with subject.tower.borrowed(with_grads=False), entering(subject.model) as calls:
            given = subject.tower.untouched(pictures, is_row)
            with nullcontext() if subject.replay is None else subject.replay.alone(tree, i):
                logits = subject.model(input_ids=ids[None], use_cache=False, **given).logits
        chosen = torch.zeros(len(ids) - 1, dtype=torch.float64)
        if logprobs:
            logp = (logits[0, :-1].double() / subject.temperature).log_softmax(-1)
            chosen = logp.gather(-1, ids[1:, None]).squeeze(-1)
        columns.append(torch.cat([chosen.new_zeros(1), chosen]).cpu())
        if pictures:
            entries.append(by_token(calls[0], is_row, subject.tower.sight))
    return torch.cat(columns), entries


def _column(name: str, want: frozenset[str], like: Tensor) -> slice:
    """Where `_run` puts one output."""
    place = sorted(want).index(name)
    return slice(place * len(like), (place + 1) * len(like))


def _report(
    subject: Subject,
    sequences: list[Ints],
    outputs: tuple[float, float],
    heads: float,
    tree: dict[str, Tensor],
    dense: dict[str, Tensor],
    rounded: list[dict[str, Tensor]],
) -> CheckReport:
    square, count = (sum(f(g) for g in dense.values()) for f in (lambda g: float(g.square().sum()), len))
    floor = FLOOR * (square / max(1, count)) ** 0.5
    scale = {name: max(float(g.norm()), floor * len(g) ** 0.5) or 1.0 for name, g in dense.items()}
    found, *others = (
        {name: float((grads[name] - g).norm()) / scale[name] for name, g in dense.items()} for grads in (tree, *rounded)
    )
    own = {name: max(other[name] for other in others) for name in dense}
    typical = float(np.median(list(own.values())))
    margin = MARGIN_LOW if subject.low_precision else MARGIN
    smallest = 4 * torch.finfo(torch.promote_types(subject.dtype, torch.float32)).eps  # where nothing rounds at all
    more = SCAN if subject.scans else smallest
    allowed = {name: margin * max(own[name], typical) + more for name in found}
    worst = max(found, key=lambda name: np.nan_to_num(found[name] / allowed[name], nan=np.inf))
    most = margin * outputs[1] + smallest
    right = outputs[0] <= most and all(found[name] <= allowed[name] for name in found)
    return CheckReport(
        len(sequences),
        sum(map(len, sequences)),
        outputs,
        (found[worst], max(own[worst], typical)),
        worst,
        subject.owner(worst),
        margin,
        right,
        subject.low_precision,
        heads > most,
    )


def _chosen(parameter: nn.Parameter, tokens: Ints, subject: Subject) -> Tensor:
    """int64: which entries of a parameter's gradient are compared, in its flat order."""
    vocabulary = subject.model.get_input_embeddings().weight.shape[0]
    device = parameter.device
    if parameter.dim() == 2 and parameter.shape[0] == vocabulary:
        rows = torch.from_numpy(np.unique(tokens)).to(device)
        step = max(1, len(rows) * parameter.shape[1] // SAMPLED)
        flat = (rows[:, None] * parameter.shape[1] + torch.arange(parameter.shape[1], device=device)).flatten()
        return flat[::step]
    step = max(1, parameter.numel() // SAMPLED)
    return torch.arange(0, parameter.numel(), step + 1 - step % 2, device=device)  # odd: not along one column


@contextmanager
def _sampled_gradients(subject: Subject, chosen: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Collects the chosen entries of every gradient, float64 on the CPU; whole gradients are freed as they come."""
    parameters = subject.parameters
    found = {name: torch.zeros(len(index), dtype=torch.float64) for name, index in chosen.items()}
    before = {name: (p.grad, p.grad_dtype) for name, p in parameters.items()}

    def collect(name: str) -> Any:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None, "called after accumulation"
            grad: Any = parameter.grad
            if isinstance(grad, DTensor):  # summed over ranks already, of which each will count its own
                grad = grad.full_tensor() / grad.device_mesh.size()
            found[name] += grad.flatten()[chosen[name]].cpu().double()
            parameter.grad = None

        setattr(hook, READS, True)
        return hook

    handles = []
    try:
        for name, p in parameters.items():
            p.grad = None
            handles.append(p.register_post_accumulate_grad_hook(collect(name)))
        yield found
        for name, p in parameters.items():
            if p.grad is not None:  # accumulated in place, past autograd
                collect(name)(p)
    finally:
        for handle in handles:
            handle.remove()
        for name, p in parameters.items():
            grad, dtype = before[name]
            p.grad = None
            p.grad_dtype = dtype
            p.grad = grad


@contextmanager
def _moved_by_rounding(subject: Subject, seed: int) -> Iterator[None]:
    """Outputs of all layers without sub-layers, and gradients through them, are multiplied by 1 - eps, 1 or 1 + eps."""
    handles = []
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, arguments: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        generator = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(seed))
        steps = torch.randint(-1, 2, output.shape, generator=generator, device=output.device).to(output.dtype)
        # transformers' norms compute in float32 whatever they are given: no model rounds less than that.
        eps = max(torch.finfo(output.dtype).eps, torch.finfo(torch.float32).eps)
        return output + output * (eps * steps)

    try:
        for module in subject.modules:
            for part in module.modules():
                if not next(part.children(), None) and next(part.parameters(), None) is not None:
                    handles.append(part.register_forward_hook(move))
        yield
    finally:
        for handle in handles:
            handle.remove()
