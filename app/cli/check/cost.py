"""What a step costs and what fits: tokens as a tree, seconds and memory by the planner's prediction.

Promises: nothing is allocated for the model; what cannot be told is left out.
"""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.cli.check.findings import Part, Reason, Rollouts, model_config
from app.cli.check.layers import measured_seconds
from app.tree import ModelReport

_OPTIMIZER_BYTES = 96
"""Read and written for a float32 parameter where torch's AdamW runs operator by operator, as on CPUs: decay 8, moments
12 + 8 + 12, denominator 8 + 8 + 8, update 16; clipping's norm 4, its scale 8; the gradient set to 0, 4."""


def sharing_and_cost(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    import numpy as np
    import torch

    from app.tree import PrefixTree, device_rates, inspect_model, inspect_tree

    batch = rollouts.batch
    _, keys = np.unique(np.array(batch.temperatures), return_inverse=True)
    tree = PrefixTree.build(batch.tokens, batch.trained, keys=keys, images=batch.images, pictures=batch.pictures)
    report = inspect_tree(tree)
    dense, leaf = report.dense_tokens / report.tree_tokens, report.leaf_tokens / report.tree_tokens
    lines = [
        f"a batch of {rollouts.groups_a_batch:,} groups: {report.sequences:,} sequences, {report.tree_tokens:,} tokens"
        f" as a tree; {dense:.2f} times fewer than one by one, {leaf:.2f} than without prefixes of others"
    ]
    figures: dict[str, Any] = {"tree_tokens": report.tree_tokens, "dense_over_tree": dense, "leaf_over_tree": leaf}
    reasons = []
    if dense < 1.1:
        reasons.append(
            Reason("note", f"sequences share little ({dense:.2f} times)", "the tree neither costs nor helps")
        )
    if rollouts.seconds is not None:
        lines.append(f"rolling a batch out took {rollouts.seconds:.3g} s here")
        figures["rollout_seconds"] = rollouts.seconds
    config = model_config(rollouts, arguments)
    if config is None:
        return [*lines, "no --model: nothing is said about time and memory"], figures, reasons
    dtype = "bfloat16" if arguments.device == "cuda" else "float32"
    # Where the run is to train on a device of this kind, what that one can do; else what such a device usually can.
    there = arguments.device == "cpu" or torch.cuda.is_available()
    rates = device_rates(config, arguments.device, dtype) if there else None
    whole = inspect_model(tree, config, arguments.device, dtype, None, None, rates)
    least = inspect_model(tree, config, arguments.device, dtype, None, report.longest, rates)
    steps = arguments.steps or rollouts.settings.get("trainer", {}).get("max_steps") or 0
    minibatches = (rollouts.settings.get("model", {}).get("init_args") or {}).get("minibatches") or 1
    source = (rollouts.settings.get("model", {}).get("init_args") or {}).get("model") or {}
    model = _model(config, source, arguments)
    held = _held(whole.parameters, dtype, model, source, arguments)
    if model is not None:
        reasons += _refused(model, tree)
    seconds = None
    if there and model is not None and not batch.pictures and source.get("quantization") is None:
        seconds = measured_seconds(model, tree, arguments.device, dtype, whole.tree_seconds)
    each = (whole.tree_seconds if seconds is None else seconds) / arguments.devices
    optimizer = 0.0 if rates is None else _OPTIMIZER_BYTES * held.trained / arguments.devices / rates.memory
    run = (each / minibatches + optimizer) * steps  # the minibatches of an epoch are the batch
    how = "usual rates" if not there else "rates measured here" if seconds is None else "measured here, by its layers"
    adapter = f", frozen, and {held.trained / 1e6:,.3g} M of an adapter" if held.is_adapted else ""
    if held.is_adapted and not held.trained:
        adapter = ", frozen, and an adapter that cannot be made here and is not counted"
    lines.append(
        f"{whole.name}, {whole.parameters / 1e6:,.3g} M parameters{adapter}, {dtype} on {arguments.device}: predicted"
        f" {each:.3g} s for forward and backward of the batch ({whole.dense_seconds / whole.tree_seconds:.1f} times"
        f" faster than one by one; {how})"
        + (f", {optimizer:.3g} s for clipping and the optimizer" if there else "")
        + (f"; {_time(run)} for {steps:,} steps" if steps > 0 else "")
    )
    fixed = held.bytes(arguments.devices) / 2**30
    beside = _engine(rollouts, whole, report.dense_tokens) / 2**30
    process = _process(arguments.device) / 2**30
    memory = arguments.gib or _memory(arguments.device) / 2**30 - process
    need, all_ = (fixed + beside + (one.memory.total - one.memory.gradients) / 2**30 for one in (least, whole))
    lines.append(
        f"memory a device, GiB: {fixed:.3g} for weights, gradients and optimizer, {beside:.3g} for an engine"
        f" beside them, {need:.3g} with the least a pass needs, {all_:.3g} with nothing computed twice; there are"
        f" {memory:.3g}"
    )
    figures |= {
        "predicted_seconds": each,
        "rates_measured": there,
        "layers_measured": seconds is not None,
        "parameters": whole.parameters,
    }
    figures |= {"predicted_optimizer_seconds": optimizer} if there else {}
    figures |= {"predicted_run_seconds": run} if steps > 0 else {}
    figures |= {"trained_parameters": held.trained}
    figures |= {"gib_fixed": fixed, "gib_least": need, "gib_all": all_, "gib_there": memory, "gib_process": process}
    if need > memory:
        reasons.append(_too_large(held, need - fixed, memory, arguments.devices))
    elif all_ > memory:
        again = least.plan.extra_forward_tokens / max(1, report.tree_tokens)
        finding = f"not all activations fit at once ({all_:.3g} of {memory:.3g} GiB)"
        reasons.append(
            Reason("note", finding, f"up to {again:.0%} of the tokens run forward twice, which costs time only")
        )
    return lines, figures, reasons


def _engine(rollouts: Rollouts, model: ModelReport, tokens: int) -> int:
    """Bytes of an engine in the trainer's process: its copy of the weights, and keys and values of a batch."""
    engine = (rollouts.settings.get("data", {}).get("init_args") or {}).get("engine") or {}
    if not isinstance(engine, dict) or not str(engine.get("class_path", "")).endswith("EmbeddedEngine"):
        return 0
    options = engine.get("init_args") or {}
    element = 2 if options.get("dtype") in ("bfloat16", "float16") else 4
    kept = min(tokens, options.get("kv_cache_tokens") or tokens)
    return element * (model.parameters + kept * model.cached)


def _process(device: str) -> int:
    """Bytes of a process that has imported what a run imports and holds no model, as this one."""
    if device != "cpu":
        return 0
    import psutil

    return int(psutil.Process().memory_info().rss)


def _time(seconds: float) -> str:
    hours, minutes = seconds / 3600, seconds / 60
    return f"{hours:.3g} h" if hours >= 1 else f"{minutes:.3g} min" if minutes >= 1 else f"{seconds:.3g} s"


@dataclass(frozen=True)
class _Held:
    """What a device holds of a model under Adam (docs/scaling.md, "Memory").

    Attributes:
        frozen: bytes of weights that are not trained, all there are below an adapter.
        trained: parameters that are; 0 of an adapter about which nothing is known.
        weights, gradients, state: bytes of each of these; the state is shared by the devices.
        is_adapted: they are an adapter's.
        saved: bytes of the frozen weights that 4 bit would save; 0 where they are so, or nothing is known.
    """

    frozen: int
    trained: int
    weights: int
    gradients: int
    state: int
    is_adapted: bool = False
    saved: int = 0

    def bytes(self, devices: int) -> float:
        """On one of so many devices."""
        return self.frozen + self.trained * (self.weights + self.gradients + self.state / devices)


def _held(
    parameters: int, dtype: str, model: Any | None, source: dict[str, Any], arguments: argparse.Namespace
) -> _Held:
    """`model`: with its adapter; None where that cannot be made."""
    if source.get("adapter") is None:
        return _Held(0, parameters, *((2, 4, 12) if dtype == "bfloat16" else (4, 4, 8)))
    import torch

    from app.tree import quantised_bytes
    from modules.models import ModelSource, build_model

    element = 2 if dtype == "bfloat16" else 4
    frozen = in_bits = element * parameters
    with suppress(ValueError), torch.device("meta"):  # of another model than the one that is asked about
        in_bits = quantised_bytes(build_model(ModelSource(path=str(arguments.model or source["path"]))), element)
    trained = 0 if model is None else sum(one.numel() for one in model.parameters() if one.requires_grad)
    if source.get("quantization") is not None:
        return _Held(in_bits, trained, 4, 4, 8, is_adapted=True)
    return _Held(frozen, trained, 4, 4, 8, is_adapted=True, saved=frozen - in_bits)


def _model(config: Any, source: dict[str, Any], arguments: argparse.Namespace) -> Any | None:
    """What is trained, on the meta device; None for an adapter of another model than the one that is asked about, or
    whose file is not here."""
    import torch

    from app.tree import auto_class
    from modules.models import ModelSource, build_model

    with torch.device("meta"):
        if source.get("adapter") is None:
            return auto_class(config).from_config(config)
        try:
            return build_model(ModelSource(path=str(arguments.model or source["path"]), adapter=source["adapter"]))
        except ValueError:
            return None


def _refused(model: Any, tree: Any) -> list[Reason]:
    """What a fit would end with, of the batch's ids and lengths."""
    from app.tree import refuse_lengths, refuse_tokens

    found = []
    for refuse in (refuse_tokens, refuse_lengths):
        try:
            refuse(model, tree)
        except ValueError as error:
            finding, _, remedy = str(error).rpartition("; ")
            found.append(Reason("no-go", f"a fit would end: {finding}", remedy))
    return found


def _too_large(held: _Held, work: float, memory: float, devices: int) -> Reason:
    """`work`, `memory`: GiB beside weights, gradients and optimizer, and of a device."""
    finding = f"the run needs more than the {memory:.3g} GiB of a device"
    state = held.trained * held.state
    room = (memory - work) * 2**30 - (held.bytes(devices) - state / devices)
    if room > 0:
        return Reason(
            "change", finding, f"{max(devices + 1, math.ceil(state / room))} devices share the optimizer's state"
        )
    if held.is_adapted and held.saved and (held.bytes(devices) - held.saved) / 2**30 + work < memory:
        gib = (held.frozen - held.saved) / 2**30
        return Reason("change", finding, f"4 bit (model.quantization: nf4) hold the frozen weights in {gib:.3g} GiB")
    if held.is_adapted:
        return Reason("no-go", finding, "take a smaller model or larger devices: frozen weights and adapter do not fit")
    if held.trained * held.weights / 2**30 + work < memory:
        return Reason(
            "change", finding, "an adapter (model.adapter) trains it: frozen weights need no gradient or state"
        )
    return Reason("no-go", finding, "take a smaller model or larger devices: not even frozen weights fit")


def _memory(device: str) -> int:
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--gib: this machine has no GPU to ask; say how much memory one has")
    return int(torch.cuda.get_device_properties(0).total_memory)
