"""Episodes as plain Python data, and batches made of them, so that naive implementations need no tensor of ours."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from app.batch import RolloutBatch, Trajectory


@dataclass
class Play:
    """One episode: its turns are (what the environment says, what the policy answers); `values` and `token_rewards` are
    of every answer token, turn by turn."""

    group: int
    reward: float
    turns: list[tuple[list[int], list[int]]]
    values: list[list[float]] = field(default_factory=list)
    token_rewards: list[list[float]] = field(default_factory=list)

    @property
    def flat_values(self) -> list[float]:
        return [v for turn in self.values for v in turn]

    @property
    def flat_rewards(self) -> list[float]:
        return [v for turn in self.token_rewards for v in turn]


def random_play(rng: random.Random, group: int, turns: int, vocabulary: int = 6) -> Play:
    """Few different tokens, so that episodes of a group share prefixes."""
    made = []
    for k in range(turns):
        said = [group + 1] if k == 0 else [rng.randrange(vocabulary) for _ in range(rng.randint(1, 2))]
        made.append((said, [rng.randrange(vocabulary) for _ in range(rng.randint(1, 3))]))
    play = Play(group, rng.choice([0.0, 0.1, 0.5, 1.0, -2.0]), made)
    play.values = [[rng.uniform(-1, 1) for _ in answer] for _, answer in made]
    play.token_rewards = [[rng.uniform(-0.2, 0) for _ in answer] for _, answer in made]
    return play


@st.composite
def plays(draw: st.DrawFn, least: int = 2) -> list[Play]:
    """One to four groups of `least` to five episodes of 1 to 20 turns; one group may be torn down to one episode."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    sizes = draw(st.lists(st.integers(least, 5), min_size=1, max_size=4))
    if len(sizes) > 1 and draw(st.booleans()):
        sizes[-1] = 1
    longest = draw(st.sampled_from([1, 3, 20]))
    return [random_play(rng, g, rng.randint(1, longest)) for g, size in enumerate(sizes) for _ in range(size)]


def to_batch(given: list[Play], whole: bool = False) -> RolloutBatch:
    """`whole`: one sequence an episode; otherwise one a turn, holding all that came before."""
    trajectories = []
    for number, play in enumerate(given):
        tokens: list[int] = []
        mask: list[bool] = []
        for k, (said, answer) in enumerate(play.turns):
            tokens = tokens + said + answer
            past = mask if whole else [False] * len(mask)
            mask = past + [False] * len(said) + [True] * len(answer)
            if whole and k < len(play.turns) - 1:
                continue
            chosen = torch.tensor(mask)
            trajectories.append(
                Trajectory(
                    tokens=torch.tensor(tokens),
                    loss_mask=chosen,
                    behavior_logprobs=-chosen.float(),
                    versions=torch.where(chosen, 0, -1),
                    reward=play.reward,
                    group_id=7 * play.group,
                    episode_id=number,
                    turn_index=0 if whole else k,
                    prompt_id=f"prompt-{play.group}",
                )
            )
    return RolloutBatch.from_trajectories(trajectories)


def column(batch: RolloutBatch, given: list[Play], name: str) -> torch.Tensor:
    """float32 [T] of `values` or `token_rewards`; junk where not trained."""
    flat = torch.full((batch.num_tokens,), 1e6)
    flat[batch.loss_mask] = torch.tensor([x for play in given for turn in getattr(play, name) for x in turn])
    return flat
