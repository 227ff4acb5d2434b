"""What finished groups were worth, before any of them is filtered out or dropped as stale.

The reward of the groups that are trained on is no learning curve: a filter for groups with a signal keeps it near the
middle whatever the policy learns. And what is dropped as stale is what took long: its length says which prompts a run
sees less of.
"""

from __future__ import annotations

from collections.abc import Mapping

from app.batch import LEFT_OUT, UNTRAINABLE_CALLS
from app.statistics import ROUNDING, equal
from datamodules.filters import episode_rewards
from datamodules.groups import Group


class Tally:
    """Sums over the groups that finished since they were last taken. No lock of its own.

    Args:
        solved_at: an episode with at least this reward has solved its prompt.

    Attributes:
        placeholders_sampled: groups that failed because a reply had a placeholder of a picture.
    """

    def __init__(self, solved_at: float = 1.0) -> None:
        self._solved_at = solved_at - ROUNDING  # rewards are sums of parts: 0.1 + 0.9 may fall short of 1.0
        self._clear()

    def _clear(self) -> None:
        self._reward = 0.0
        self._episodes = self._groups = self._solved = self._unsolved = self._flat = 0
        self._untrainable = self._left_out = 0
        self.placeholders_sampled = 0
        self._tokens = self._stale_tokens = self._stale_episodes = 0

    def finished(self, group: Group) -> None:
        """All its episodes have ended, and have their rewards."""
        rewards = episode_rewards(group).values()
        solved = sum(reward >= self._solved_at for reward in rewards)
        self._reward += sum(rewards)
        self._episodes += len(rewards)
        self._groups += 1
        self._solved += solved == len(rewards)
        self._unsolved += solved == 0
        self._flat += equal(rewards)
        of_episodes = {one.episode_id: one.metadata.get(UNTRAINABLE_CALLS, 0) for one in group.trajectories}
        self._untrainable += sum(of_episodes.values())
        self._left_out += len({one.episode_id for one in group.trajectories if LEFT_OUT in one.metadata})
        self._tokens += _generated(group)

    def stale(self, group: Group) -> None:
        """It was dropped because the policy had moved on."""
        self._stale_episodes += len(episode_rewards(group))
        self._stale_tokens += _generated(group)

    def state_dict(self) -> dict[str, float]:
        """The sums, by name."""
        return {name: value for name, value in vars(self).items() if name != "_solved_at"}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on with the sums of a `state_dict`; of none, from nothing."""
        self._clear()
        vars(self).update(state)

    def take(self) -> dict[str, float]:
        """`reward` and `length` (generated tokens), means over the episodes of all finished groups; `solved` and
        `unsolved`, the shares of these groups all of whose episodes, or none, solved the prompt; `flat`, the share
        whose episodes all have one reward, so that no advantage is left of it; `stale_length`, as `length`, of groups
        dropped as stale; and where there are any `left_out`, the share of the episodes that are not trained on though
        their group is, `untrainable_calls`, replies an episode that were sampled so that they cannot be trained on, and
        `placeholder_sampled`, groups that failed as a reply had one. Names without data are missing; what is taken is
        forgotten."""
        found = {}
        if self._groups:
            found = {"reward": self._reward / self._episodes, "length": self._tokens / self._episodes}
            found |= {"solved": self._solved / self._groups, "unsolved": self._unsolved / self._groups}
            found["flat"] = self._flat / self._groups
        if self._left_out:
            found["left_out"] = self._left_out / self._episodes
        if self._untrainable:
            found[UNTRAINABLE_CALLS] = self._untrainable / self._episodes
        if self.placeholders_sampled:
            found["placeholder_sampled"] = float(self.placeholders_sampled)
        if self._stale_episodes:
            found["stale_length"] = self._stale_tokens / self._stale_episodes
        self._clear()
        return found


def _generated(group: Group) -> int:
    return sum(int(one.loss_mask.sum()) for one in group.trajectories)
