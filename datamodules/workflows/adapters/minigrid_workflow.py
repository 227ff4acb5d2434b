"""A grid world as an episode: the model sees what the agent sees, and answers each view with a word for an action.

Promises: the ids of every turn are exactly those served, the next view's appended to them (see
`datamodules.workflows.turns`); the reward is 1 for an accomplished mission, else 0; a reply that is no action is told
so and counted, and takes a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from app.pictures import Picture
from datamodules.conversations.chat_template import Chat
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters.minigrid_prompts import GridWorld
from datamodules.workflows.base import EpisodeEngine, Workflow
from datamodules.workflows.tool_calls import said_aloud
from datamodules.workflows.turns import ReplyOptions, Turns

_Sequences = Literal["whole", "turns"]


class MiniGridWorkflow(Workflow):
    """Plays the episodes of `MiniGridPrompts`: a view, an action, until the mission is accomplished or failed.

    An episode ends with its world ("stop"), with a reply cut off or a context that is full ("length"), or after the
    last turn ("max_turns"). The metadata counts `steps`, and `malformed_actions` where there were any.

    Args:
        max_turns: most replies, at least 1.
        max_new_tokens: most tokens of a reply, at least 1.
        temperature: of sampling, above 0.
        stop: tokens, besides what ends a turn anyway, that end a reply (each must be one token).
        sequences: "whole" or "turns"; see `datamodules.workflows.turns.Sequences`.
        template_options: further arguments of the chat template, such as `{enable_thinking: false}`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        max_turns: int = 16,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        stop: Sequence[str] = (),
        sequences: _Sequences = "whole",
        template_options: dict[str, Any] | None = None,
    ) -> None:
        checks.at_least(1, {"MiniGridWorkflow.max_turns": max_turns})
        checks.one_of("MiniGridWorkflow.sequences", sequences, get_args(_Sequences))
        self.max_turns, self.max_new_tokens, self.sequences = max_turns, max_new_tokens, sequences
        self.stop = tuple(stop)
        self._options = ReplyOptions("MiniGridWorkflow", max_new_tokens, temperature, stop)
        self._template_options = template_options
        self._chat: Chat | None = None

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tries the chat template."""
        self._options.prepare(tokenizer)
        self._chat = Chat(tokenizer, options=self._template_options)
        self._chat.after_reply([_told({"type": "image"})])

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if engine.has_reward:
            raise ValueError("MiniGridWorkflow: rewards are the world's; leave the data's reward out (null)")
        assert self._chat is not None, "prepare comes first"
        world, turns = GridWorld.of(prompt), Turns(prompt, self._options)
        actions, malformed = list[str](), 0
        while (response := await turns.generate(engine)) is not None and response.finish_reason != "length":
            word = said_aloud(turns.reply(engine.tokenizer, special=True)).strip()
            if is_action := world.act(word):
                actions.append(word)
            else:
                malformed += 1
            if world.done:
                break
            if turns.count == self.max_turns:
                turns.finish_reason = "max_turns"
                break
            self._show(engine, turns, prompt, world, is_action)
        metadata: dict[str, object] = {"completion": " ".join(actions), "done": world.done, "steps": len(actions)}
        if malformed:
            metadata["malformed_actions"] = malformed
        return turns.trajectories(self.sequences, float(world.success), metadata)

    def _show(self, engine: EpisodeEngine, turns: Turns, prompt: Prompt, world: GridWorld, is_action: bool) -> None:
        """The next view is what the model is told, behind a word about a reply that was no action."""
        assert self._chat is not None and engine.image_processor is not None, "prompts with pictures were encoded"
        where = f"prompt '{prompt.id}', turn {turns.count + 1}"
        picture: Picture = engine.image_processor.picture(world.picture(), where)
        words = ", ".join(prompt.metadata["actions"])
        told = [] if is_action else [{"type": "text", "text": f"Answer with one of these words: {words}."}]
        after = self._chat.after_reply([_told(*told, {"type": "image"})], turns.end, engine.ends.ids)
        ids, images = engine.image_processor.expanded(after, [picture], where)
        turns.extend(ids, images, (picture,))


def _told(*parts: dict[str, str]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}
