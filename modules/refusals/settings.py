"""What modules refuse before any training: options out of range or without effect, and settings of the Trainer that
they cannot honour. What an algorithm cannot be composed of is refused in `algorithm.py`.

Promises: every error is a ValueError that names the key and the remedy. Beside them, what a step says whose numbers are
not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app import checks
from app.batch import BatchError, RolloutBatch
from app.exchange import OneProcess, Ranks
from app.hub import check_reachable
from app.text import why_not
from modules.advantages.teacher import TeacherServer
from modules.algorithm import Algorithm
from modules.models import ModelSource, Refresh
from modules.objectives import AGGREGATIONS

_OPTIMIZER = "model.init_args.optimizer.init_args"
_TORCHS_WORDS = {"learning rate": "lr", "beta": "betas", "epsilon": "eps"}  # others it calls by their names
_OF_OPTIONS = (ValueError, TypeError, ArithmeticError, RuntimeError)
_MATRICES = (
    *("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head"),
    *("model.layers.0.self_attn.q_proj.lora_A.default", "model.layers.0.self_attn.q_proj.lora_B.default"),
)
_VECTORS = ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.input_layernorm.weight", "model.norm.weight")
_LARGEST_LR = 1e3  # of plain gradient descent on toys; Adam's are below 0.1


def refuse_options(tree_training_mode: str, chunk_tokens: Any, self_check: str) -> None:
    """Options of the module itself."""
    checks.one_of("self_check", self_check, ("error", "fallback", "skip"))
    checks.one_of("tree_training_mode", tree_training_mode, ("disabled", "sparse", "dta"))
    if chunk_tokens != "auto" and tree_training_mode != "dta":
        raise ValueError(
            f"chunk_tokens={chunk_tokens} has no effect with tree_training_mode={tree_training_mode}, whose chunks"
            " are as large as live_tokens: set live_tokens, or tree_training_mode=dta"
        )


def refuse_trainer(trainer: Any, stage: str, exchange: Ranks, self_check: str) -> None:
    """Settings of the Trainer, and an option of the module that does not go with them. `exchange`: the ranks, as its
    strategy has them work."""
    if exchange.group is not None and self_check == "fallback":
        raise ValueError(
            "self_check='fallback' has ranks run every sequence alone, which those of a group cannot share: set"
            " model.self_check to 'error', or DTAStrategy(group_size=1)"
        )
    alone = isinstance(exchange, OneProcess)
    if alone and (trainer.world_size > 1 or isinstance(trainer.strategy, ParallelStrategy)):
        raise ValueError(
            f"trainer.strategy: {type(trainer.strategy).__name__} on {trainer.world_size} processes does not sum"
            " gradients as tree training needs: set trainer.strategy to app.strategies.DTAStrategy"
        )
    if stage == "fit" and trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: losses are already divided by the"
            " count of a whole optimizer step; set it to 1 and raise the data's batch_size instead"
        )
    schedulers = [one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]
    if stage == "fit" and any(one.going_to_accumulate_grad_batches() for one in schedulers):
        raise ValueError(
            "trainer.callbacks: GradientAccumulationScheduler would add up losses that are already divided by the count"
            " of a whole optimizer step; remove it and raise the data's batch_size instead"
        )
    if stage == "fit" and any(isinstance(one, LearningRateFinder) for one in trainer.callbacks):
        raise ValueError(
            "trainer.callbacks: LearningRateFinder sets a rate of the module's own, which there is none of: remove it,"
            " and give the optimizer its lr (examples/sweep searches one)"
        )
    if trainer.precision == "bf16-true" and alone:
        raise ValueError(
            f"trainer.precision=bf16-true with trainer.strategy {type(trainer.strategy).__name__}: it keeps no float32"
            " masters of bfloat16 parameters, and changes torch's default dtype under the rollouts' threads; set"
            " trainer.strategy to app.strategies.DTAStrategy (one process will do), or trainer.precision to bf16-mixed"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ValueError(
            f"trainer.precision={trainer.precision}: the tree pass does not scale losses, which float16 needs;"
            " use bf16-mixed, bf16-true or 32-true"
        )


def refuse_frozen(key: str, source: ModelSource) -> None:
    """A model that would be trained, and has nothing to train. `key`: its option's."""
    if source.quantization is not None and source.adapter is None:
        raise ValueError(
            f"{key}.quantization: {source.quantization} keeps weights in 4 bit, which cannot be trained themselves: set"
            f" {key}.adapter (such as {{r: 16}}), or leave quantization out"
        )


def refuse_quantised(trainer: Any, key: str, source: Any) -> None:
    """Settings of the Trainer that do not go with 4 bit. `source`: of the option `key`, a model or another choice."""
    if not isinstance(source, ModelSource) or source.quantization is None:
        return
    if getattr(trainer.strategy, "shard_parameters", False):
        raise ValueError(
            f"{key}.quantization: {source.quantization} with DTAStrategy(shard_parameters=True): codes and scales of 4"
            " bit are not cut up; set shard_parameters to false (every rank then holds all of them, an eighth of"
            " float32), or leave quantization out"
        )
    if trainer.precision == "64-true":
        raise ValueError(
            f"{key}.quantization: {source.quantization} with trainer.precision=64-true: 4 bit have no float64; set"
            " precision to 32-true or bf16-true"
        )


def refuse_narrow(parameters: Iterable[torch.nn.Parameter], trainer: Any, exchange: Ranks) -> None:
    """Trained parameters below float32 without masters: gradients are float32, and most steps would be lost to
    rounding."""
    narrow = {p.dtype for p in parameters if p.requires_grad and p.is_floating_point() and p.element_size() < 4}
    if narrow and isinstance(exchange, OneProcess):
        dtype = str(narrow.pop()).removeprefix("torch.")
        raise ValueError(
            f"model.dtype: {dtype} with trainer.strategy {type(trainer.strategy).__name__}, which keeps no float32"
            " masters: set trainer.strategy to app.strategies.DTAStrategy (one process will do), or model.dtype to"
            " float32"
        )


def refuse_optimizer(make_optimizer: Callable[..., Any], make_lr_scheduler: Callable[..., Any] | None) -> None:
    """Options of optimizer and scheduler, tried before a model is built on parameters such as models have, by name, as
    `with_names` gives them. One that chooses by name, and none of these, is taken at its word."""
    key = _OPTIMIZER
    try:
        optimizer = _on_trial(make_optimizer)
        key = "model.init_args.lr_scheduler.init_args"
        if make_lr_scheduler is not None:
            make_lr_scheduler(optimizer)
    except _OF_OPTIONS as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "empty parameter list" in first:  # torch's words, said after it has looked at the options
            return
        raise ValueError(f"{key}{_option(first)}: {first}; correct it") from error
    for name, value in optimizer.defaults.items():
        if isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"{_OPTIMIZER}.{name}: {value} is not finite")
    lr = float(optimizer.defaults.get("lr") or 0.0)  # None: of optimizers that find their own
    if not 0 <= lr <= _LARGEST_LR:
        raise ValueError(f"{_OPTIMIZER}.lr: {lr:g}, must be between 0 and {_LARGEST_LR:g}: larger steps leave no model")
    decay = float(optimizer.defaults.get("weight_decay") or 0.0)
    if lr * decay > 1:
        raise ValueError(
            f"{_OPTIMIZER}.weight_decay: {decay:g} times lr {lr:g} is above 1: a step would turn weights round"
        )


def _on_trial(make_optimizer: Callable[..., Any]) -> Any:
    matrices = [(f"policy.{name}.weight", torch.nn.Parameter(torch.zeros(2, 2))) for name in _MATRICES]
    vectors = [(f"policy.{name}", torch.nn.Parameter(torch.zeros(2))) for name in _VECTORS]
    try:
        return make_optimizer([*matrices, *vectors])
    except _OF_OPTIONS:
        return make_optimizer(matrices)  # all that adapters have, and that some take


def _option(told: str) -> str:
    """`.lr` and the like, of the option that torch's "Invalid learning rate: -1" is about; "" where it is not told."""
    found = re.match(rf"Invalid ({'|'.join(_TORCHS_WORDS)}|\w+)(?: (?:parameter|value)\b|:)", told)
    return "" if found is None else f".{_TORCHS_WORDS.get(found[1], found[1])}"


# `PolicyModule`


def check_groups(minibatches: int, algorithm: Algorithm, data: Any) -> None:
    """`data`: the datamodule, which may say how many groups a batch holds, and how many episodes a group."""
    if (size := getattr(data, "episodes_per_group", None)) is not None:
        algorithm.check_group_size(*size)
    option, groups = getattr(data, "groups_per_batch", ("", minibatches))
    if minibatches > groups:
        raise ValueError(
            f"minibatches: {minibatches}, but data.{option}: {groups} groups a batch, which stay whole: set minibatches"
            f" to {groups} at most, or raise data.{option}"
        )


def check_proximal(proximal: str, steps_per_batch: int) -> None:
    if proximal == "interpolated" and steps_per_batch == 1:
        raise ValueError(
            "proximal=interpolated with minibatches=1 and epochs=1: in the only step of a batch the proximal policy is"
            " the policy itself, exactly and without a pass, which an interpolation would replace by a guess: set"
            " proximal to recomputed, or minibatches or epochs above 1"
        )


def check_aggregation(mode: str, constant: float | None) -> None:
    checks.one_of("aggregation", mode, AGGREGATIONS)
    if mode == "constant" and (constant is None or not 0 < constant < math.inf):
        raise ValueError(f"aggregation=constant needs aggregation_constant above 0 (tokens), got {constant}")
    if mode != "constant" and constant is not None:
        raise ValueError(f"aggregation_constant has no effect with aggregation={mode}; remove it")


def note_aggregation(algorithm: Algorithm, given: str | None, mode: str) -> None:
    """A line for those who name half of Dr.GRPO."""
    chosen, key = algorithm.advantage, "advantage"
    name = chosen.name if chosen is not None else ""
    if chosen is not None and name == "high_entropy":
        name, key = chosen.options.get("estimator", ""), "advantage_options: estimator"
    if name == "dr_grpo" and given is None:
        rank_zero_warn(
            f"{key}=dr_grpo is half of Dr.GRPO: aggregation is {mode}, the paper's is constant (with"
            " aggregation_constant, the longest answer in tokens); naming an aggregation silences this line"
        )


def note_logging(trainer: Any, steps: int) -> None:
    """A line where loggers never hear of a first step of a batch, of `steps` each, with which alone some numbers come.
    Callbacks hear of all."""
    every = trainer.log_every_n_steps
    if trainer.loggers and every and math.gcd(every, steps) > 1:
        rank_zero_warn(
            f"trainer.log_every_n_steps: {every} never falls on the first of the {steps} steps of a batch"
            " (model.minibatches x model.epochs), with which alone rollouts/reward, reward/<part>, mismatch_kl and the"
            f" like are logged: set it to 1, or to a number that has no divisor in common with {steps}"
        )


_WEIGHTS = (
    "weights that are not finite, or that overflow in the dtype they run in: name weights that are whole (path), or set"
    " dtype to float32"
)
_PASSES = {  # columns: what they are, and the option of the model that they are of
    "reference": ("the reference's log-probability", "model.reference"),
    "proximal": ("the policy's log-probability", "model.model"),
    "entropy": ("the policy's entropy", "model.model"),
    "values": ("the critic's value", "model.critic (model.model where it is shared)"),
}


def refuse_not_finite(name: str, column: Tensor, batch: RolloutBatch) -> None:
    """Of a column [T] that a forward pass made. Raises BatchError where a trained token's value is not finite."""
    bad = batch.loss_mask & ~torch.isfinite(column)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        i = int(torch.searchsorted(batch.cu_seqlens, at, right=True)) - 1
        what, key = _PASSES[name]
        raise BatchError(
            f"{key}: {what} is {float(column[at])} for token {at - int(batch.cu_seqlens[i])} of sequence {i} (prompt"
            f" '{batch.prompt_ids[i]}'; {int(bad.sum())} trained tokens in all): {_WEIGHTS}"
        )


def not_finite_in_step(values: Mapping[str, float], algorithm: Algorithm) -> str:
    """What made a step's gradient not finite, in the order in which it is computed: a sentence, or "".

    Args:
        values: the step's metrics, over all ranks.
    """

    def odd(*names: str) -> bool:
        return any(not math.isfinite(values.get(name, 0.0)) for name in names)

    why = ""
    if odd("entropy"):
        why = f"model.model: the policy's log-probabilities of trained tokens are not finite: {_WEIGHTS}"
    elif bad := next((cost.name for _, cost in algorithm.loss_costs if odd(cost.name)), None):
        why = f"regularisers.{bad} is not finite on trained tokens whose log-probabilities are: correct the function"
    elif odd("loss", *algorithm.objective_metrics):
        why = (
            f"objective={algorithm.objective.name} is not finite on trained tokens whose log-probabilities are: correct"
            " the function, or bound ratios and advantages"
        )
    return f" {why}." if why else ""


def check_likeliest(count: int, vocab_size: int) -> None:
    """`count`: tokens that a regulariser compares at each position."""
    if count > vocab_size:
        raise ValueError(
            f"regularisers.options.k: {count} likeliest tokens, of a model whose vocabulary has {vocab_size}: set k to"
            f" {vocab_size} at most"
        )


def check_sharded_reference(refresh: Refresh | None, offload: bool, rounded: bool) -> None:
    """Under DTAStrategy(shard_parameters=True). `rounded`: the reference is narrower than float32."""
    if offload:
        raise ValueError(
            "model.reference_offload: moves whole weights, and DTAStrategy(shard_parameters=True) leaves a rank"
            " only shards of them; set reference_offload: false"
        )
    if refresh is not None and refresh.ema > 0 and rounded:
        raise ValueError(
            f"model.reference_refresh.ema={refresh.ema}: the average of a bfloat16 reference is kept in float32 beside"
            " it, which DTAStrategy(shard_parameters=True) does not cut up; set ema: 0 (the reference then becomes the"
            " policy), or train in float32 (precision 32-true or bf16-mixed)"
        )


def check_reference(
    algorithm: Algorithm,
    reference: ModelSource | TeacherServer | str | None,
    refresh: Refresh | None,
    offload: bool,
    has_critic: bool,
) -> None:
    if isinstance(reference, str) and reference not in ("initial", "base"):
        raise ValueError(
            f"reference: '{reference}' is neither 'initial' nor 'base' nor a model; write reference: {{path: DIR}}"
        )
    reads = bool(algorithm.needs & {"reference", "soft"})
    if reads and reference is None:
        raise ValueError(
            f"reference is missing: {_readers(algorithm)} compares the policy with one; set reference to 'initial' or"
            " to a model"
        )
    if not reads and reference is not None:
        raise ValueError(
            "reference has no effect: neither the objective nor a regulariser reads it; name regularisers: [{name: kl,"
            " coef: ...}], or remove reference"
        )
    if isinstance(reference, ModelSource) and reference.freeze:
        raise ValueError("reference.freeze has no effect: nothing of a reference is trained; remove it")
    advantage = algorithm.advantage
    still = reference == "initial" and refresh is None
    if still and advantage and advantage.name == "distill" and not advantage.options.get("task"):
        raise ValueError(
            "reference: 'initial' would teach the policy to be what it was; name the teacher's directory in"
            " reference.path, give the task a weight in advantage_options.task, or, for a policy that teaches itself by"
            " the workflow's hints, set reference_refresh"
        )
    for key, given in (("reference_refresh", refresh is not None), ("reference_offload", offload)):
        if given and reference is None:
            raise ValueError(f"{key} has no effect without a reference; set one, or remove {key}")
        if given and isinstance(reference, TeacherServer):
            raise ValueError(f"{key} has no effect on a reference that a server has; remove {key}")
        if given and reference == "base":
            raise ValueError(f"{key} has no effect on reference 'base', which is the policy itself; remove {key}")
    if "values" in algorithm.needs and not has_critic:
        raise ValueError(
            f"advantage={algorithm.advantage.name if algorithm.advantage else ''} needs a critic: set class_path to"
            " modules.ActorCriticModule"
        )


def _readers(algorithm: Algorithm) -> str:
    costs = [choice for _, choice in algorithm.loss_costs + algorithm.reward_costs]
    return " and ".join(c.name for c in (algorithm.objective, *costs) if c.needs & {"reference", "soft"})


def check_own_tokens(tokenizer: PreTrainedTokenizerBase | None, policy: ModelSource) -> None:
    """Compares the tokenizer of the data with the one beside the weights: where a token has another number the model
    reads other texts than it is trained on. Tokens of one of them alone are nothing to compare.

    Raises:
        ValueError: a token has two numbers; a tokenizer that cannot be read.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or policy.path in (None, tokenizer.name_or_path):
        return
    own = _vocabulary(policy.path)
    for token, number in tokenizer.get_vocab().items() if own else ():
        if own.get(token, number) != number:
            raise ValueError(
                f"data.tokenizer: {token!r} is {number} there and {own[token]} in the tokenizer beside the weights in"
                f" '{policy.path}', which would read other texts: name that directory in data.tokenizer"
            )


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase | None, policy: ModelSource, reference: str | None, key: str = "reference"
) -> None:
    """Compares the tokenizer in the directory `reference`, the option `key`'s, with `tokenizer`, that of the rollouts,
    or where there is none with the one beside the policy's weights: log-probabilities of a model that numbers its
    tokens otherwise would be of other texts. A directory without a tokenizer is taken at its word.

    Raises:
        ValueError: a token has another number in the reference, or none; a tokenizer that cannot be read.
    """
    if reference is None or policy.path == reference:
        return
    other = _vocabulary(reference)
    mine = _vocabulary(policy.path) if tokenizer is None else dict(tokenizer.get_vocab())
    for token, number in mine.items() if other else ():
        if other.get(token) != number:
            there = f"{other[token]} there" if token in other else "none of its tokens"
            raise ValueError(
                f"{key}: '{reference}' has another tokenizer than this run: {token!r} is {number} here and {there}, so"
                " what it says would be of other texts; take a model of the same family"
            )


_TOKENIZERS = ("tokenizer.json", "tokenizer.model*", "tekken.json", "vocab.*", "*.tiktoken", "*.model")
"""Files that hold a vocabulary; without one transformers makes a tokenizer of the special tokens."""


def _vocabulary(path: str | None) -> dict[str, int]:
    """Token to id; empty where no tokenizer lies beside the weights, for which transformers would make one up."""
    if path is None or (Path(path).is_dir() and not any(any(Path(path).glob(name)) for name in _TOKENIZERS)):
        return {}
    try:
        check_reachable(path, "tokenizer_config.json")
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        found = dict(tokenizer.get_vocab())
    except Exception as error:  # files that are cut or of another kind fail anywhere in transformers
        if not Path(path).is_dir():  # a name on the hub, of which there may be the weights alone
            return {}
        raise ValueError(f"the tokenizer beside '{path}' cannot be read: {why_not(error)}") from error
    if not found:
        raise ValueError(f"the tokenizer beside '{path}' has no tokens: its files are incomplete; copy them again")
    if len(found) == len(tokenizer.get_added_vocab()):  # of a name on the hub that has none: what was made up
        return {}
    return found
