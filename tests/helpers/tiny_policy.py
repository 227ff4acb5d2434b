"""A tiny Qwen3, hand-made rollout batches with shared prefixes, a stream of them, and a Trainer that runs in a second.

`naive_*` is the independent truth: plain transformers forwards, one sequence at a time, plain torch optimizers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from app.batch import TEACHER_PROMPT, EvalHandle, RolloutBatch, Trajectory
from datamodules.pipeline.loaders import Position, StepLoader
from modules import ModelSource, build_model
from tests.helpers.tiny_model import TINY_MODEL

VOCABULARY = 17
CONFIG: dict[str, Any] = {
    **TINY_MODEL,
    "vocab_size": VOCABULARY,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,
}


def source(**changed: Any) -> ModelSource:
    return ModelSource(config={**CONFIG, **changed})


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def make_batch(
    seed: int = 0,
    groups: int = 3,
    episodes: int = 3,
    version: int = 0,
    temperatures: tuple[float, ...] = (1.0,),
    recorded: bool = True,
) -> RolloutBatch:
    """Groups of episodes; in each group the last episode has three turns, each extending the one before.

    All prompts begin with the same tokens, so there is sharing within episodes, groups and the batch.
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(2, VOCABULARY, (count,), generator=rng).tolist()

    system = draw(4)
    trajectories = []
    for group in range(groups):
        prompt = system + draw(2 + group)
        for episode in range(episodes):
            tokens, mask, reward = list(prompt), [False] * len(prompt), float(torch.rand((), generator=rng))
            for turn in range(3 if episode == episodes - 1 else 1):
                tokens, mask = tokens + draw(1 + turn), mask + [False] * (1 + turn)
                answer = draw(2 + (group + episode + turn) % 3)
                tokens, mask = tokens + answer, [False] * len(mask) + [True] * len(answer)
                chosen = torch.tensor(mask)
                behavior = -3.5 * torch.rand(len(tokens), generator=rng)
                trajectories.append(
                    Trajectory(
                        tokens=torch.tensor(tokens),
                        loss_mask=chosen,
                        behavior_logprobs=behavior * chosen if recorded else torch.zeros(len(tokens)),
                        versions=torch.where(chosen, version if recorded else -1, -1),
                        reward=reward,
                        group_id=group,
                        episode_id=group * episodes + episode,
                        turn_index=turn,
                        prompt_id=f"prompt-{group}",
                        temperature=temperatures[group % len(temperatures)],
                    )
                )
    return RolloutBatch.from_trajectories(trajectories)


def make_twins(seed: int = 0) -> RolloutBatch:
    """Three groups of the same sequences, whose teachers see two richer prompts, and the policy's own."""
    one, copies = make_batch(seed, groups=1), 3
    number = torch.arange(copies).repeat_interleave(len(one))
    hints = []
    for sequence, mask in zip(one.sequences(), one.split(one.loss_mask), strict=True):
        prompt = sequence[: int(mask.nonzero()[0])].tolist()
        hints.append([[3, 9, 14, *prompt], [11, 2, 7, *prompt]])
    return RolloutBatch(
        tokens=one.tokens.repeat(copies),
        loss_mask=one.loss_mask.repeat(copies),
        behavior_logprobs=one.behavior_logprobs.repeat(copies),
        versions=one.versions.repeat(copies),
        cu_seqlens=torch.cat([one.cu_seqlens[:1], one.lengths().repeat(copies).cumsum(0)]),
        rewards=one.rewards.repeat(copies),
        group_ids=number,
        episode_ids=one.episode_ids.repeat(copies) + 100 * number,
        turn_indices=one.turn_indices.repeat(copies),
        temperatures=one.temperatures.repeat(copies),
        prompt_ids=[f"prompt-{k}" for k in number.tolist()],
        finish_reasons=[*one.finish_reasons] * copies,
        metadata=[*({TEACHER_PROMPT: two[k]} for k in range(2) for two in hints), *({} for _ in hints)],
    )


class Batches(L.LightningDataModule):
    """The batches again and again, an epoch a time; rank 0 owns them."""

    def __init__(self, batches: list[RolloutBatch], held_out: list[RolloutBatch | None] | None = None) -> None:
        super().__init__()
        self.batches, self.held_out = batches, held_out or []
        self.batches_per_epoch = len(batches)
        self.position = Position(lambda first: first + 1)

    def train_dataloader(self) -> StepLoader:
        return StepLoader(self)

    def is_under_way(self, version: int) -> bool:
        return self.position.is_under_way(version)

    def hand_out(self, version: int) -> RolloutBatch | None:
        return self._mine(self.batches[self.position.hand_out(version).start % len(self.batches)])

    def state_dict(self) -> dict[str, int]:
        return self.position.state_dict(self.trainer.lightning_module.policy_version)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position.load_state_dict(state_dict, int)

    def val_dataloader(self) -> Any:
        # A loader of a plain list would be taken for several loaders.
        handles = [EvalHandle(self._mine(batch), "held-out") for batch in self.held_out]
        return torch.utils.data.DataLoader(handles, batch_size=None)

    test_dataloader = val_dataloader

    def _mine(self, batch: RolloutBatch | None) -> RolloutBatch | None:
        return batch if self.trainer.global_rank == 0 else None


class Metrics(L.Callback):
    """What the module logged, step by step (its own hooks run after a callback's, hence at the next start)."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._seen = 0

    def on_train_batch_start(self, trainer: L.Trainer, *unused: Any) -> None:
        self._read(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *unused: Any) -> None:
        self._read(trainer)

    def _read(self, trainer: L.Trainer) -> None:
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            results: Any = trainer._results  # `logged_metrics` still holds what earlier steps logged
            self.steps.append({name: float(value) for name, value in results.metrics(on_step=True)["log"].items()})


def trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
        "callbacks": list(callbacks),
    }
    return L.Trainer(**{**settings, **options})


def fit(
    module: L.LightningModule, batches: list[RolloutBatch], seed: int = 0, **options: Any
) -> list[dict[str, float]]:
    """Trains from the weights of `seed`; returns the metrics of every step."""
    torch.manual_seed(seed)
    metrics = Metrics()
    trainer(metrics, **options).fit(module, Batches(batches))
    return metrics.steps


def parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """Of all ranks, where each holds a shard."""
    named = {name: p.detach() for name, p in module.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in named.items()}


def naive_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_model(source())


def naive_outputs(model: Any, batch: RolloutBatch, i: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one sequence, entry 0 being 0: [L], [L]."""
    start, stop = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
    tokens = batch.tokens[start:stop]
    logits = model(tokens[None]).logits[0, :-1] / batch.temperatures[i]
    logp = logits.log_softmax(-1)
    pad = torch.zeros(1)
    chosen = logp.gather(-1, tokens[1:, None])[:, 0]
    return torch.cat([pad, chosen]), torch.cat([pad, -(logp.exp() * logp).sum(-1)])


def naive_policy_loss(
    model: Any,
    batch: RolloutBatch,
    i: int,
    chosen: list[int],
    *,
    aggregation: str = "token_mean",
    constant: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    normalize_std: bool = True,
    kl_coef: float = 0.0,
    reference: Any = None,
    entropy_coef: float = 0.0,
    old: list[Tensor] | None = None,
) -> Tensor:
    """GRPO's loss of one sequence, token by token. `old`: log-probabilities instead of the sampler's, by sequence."""
    logp, entropy = naive_outputs(model, batch, i)
    masks = batch.split(batch.loss_mask)
    before = old[i] if old is not None else batch.split(batch.behavior_logprobs)[i]
    advantage = naive_grpo(batch, normalize_std)[i]
    with torch.no_grad():
        anchor = naive_outputs(reference, batch, i)[0] if reference is not None else logp.detach()
    owners, own = [int(batch.episode_ids[j]) for j in chosen], int(batch.episode_ids[i])
    if aggregation == "token_mean":
        weight = 1 / sum(int(masks[j].sum()) for j in chosen)
    elif aggregation == "sequence_mean":
        weight = 1 / (len(set(owners)) * owners.count(own) * int(masks[i].sum()))
    elif aggregation == "episode_mean":
        weight = 1 / (len(set(owners)) * sum(int(masks[j].sum()) for j, e in zip(chosen, owners) if e == own))
    else:
        weight = 1 / (len(set(owners)) * constant)
    total = torch.zeros(())
    for t in masks[i].nonzero()[:, 0].tolist():
        ratio = (logp[t] - before[t]).exp()
        loss = -min(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
        toward = (anchor[t] - logp[t]).exp() - 1 - (anchor[t] - logp[t])
        total = total + weight * (loss + kl_coef * toward - entropy_coef * entropy[t])
    return total


def naive_grpo(batch: RolloutBatch, normalize_std: bool = True) -> list[float]:
    """The advantage of every sequence, by Python's own statistics over episodes."""
    rewards: dict[int, dict[int, float]] = {}
    for group, episode, reward in zip(batch.group_ids.tolist(), batch.episode_ids.tolist(), batch.rewards.tolist()):
        rewards.setdefault(group, {})[episode] = reward
    out = []
    for group, reward in zip(batch.group_ids.tolist(), batch.rewards.tolist()):
        values = list(rewards[group].values())
        spread = statistics.stdev(values) + 1e-6 if normalize_std else 1.0
        out.append((reward - statistics.mean(values)) / spread)
    return out


def naive_training(
    model: Any,
    batches: list[RolloutBatch],
    splits: Callable[[RolloutBatch, int], list[list[int]]],
    sequence_loss: Callable[..., Tensor],
) -> None:
    """For every batch and each of its lists of sequences: zero grad, sum of sequence losses, backward, step.

    `sequence_loss(model, batch, i, chosen)`: the loss of sequence i, divided by counts of the sequences `chosen`.
    """
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(batches):
        for chosen in splits(batch, number):
            optimizer.zero_grad()
            for i in chosen:
                sequence_loss(model, batch, i, chosen).backward()
            optimizer.step()
