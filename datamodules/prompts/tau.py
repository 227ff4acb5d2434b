"""Recorded conversations as tasks to be played again: a prompt a task, for `TauReplayWorkflow`.

    class_path: datamodules.prompts.TauPrompts
    init_args: {path: "${ARBORIST_DATA}/tau/airline_tokens.npz"}

Promises: broken data is refused when the source is made, by file and line or trajectory; what users and tools said is
kept token by token, as recorded. Importing this module is cheap; reading a file is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app import checks
from datamodules.files.data_files import resolve
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.order import DealingOrder

if TYPE_CHECKING:
    from datamodules.conversations.tokens import Conversation

TOOL_RESPONSE_ID = 151665
"""`<tool_response>`, with which each result begins, in Qwen3's ids."""


class TauPrompts(PromptSource):
    """One prompt for every (task, model) of a file of recorded conversations, with all its trials.

    `metadata["trials"]` lists them: `{"trial", "reward", "prompt": ids before the first generated turn, "turns":
    [{"tokens": generated tokens, "end": the last of them, "after": ids that follow, "results": tool results among
    them}]}`. Samples of a prompt replay its trials in turn, so that groups are those of the recording.

    Args:
        path: token arrays (`.npz`), or conversations as text (`.jsonl`, `.jsonl.gz`; these need `tokenizer`).
            `${ARBORIST_DATA}` and other environment variables are expanded.
        tokenizer: directory of a tokenizer with a chat template, for text.
        system: `*_system.json` with the system prompt and tools that precede every conversation, for text.
        tasks: names of the tasks to use; None for all.
        trials: the first so many of each task; None for all that are recorded.
        vocab_size: token ids are taken modulo this, so that a smaller model can play them; None leaves them.
        tool_response_id: token that begins a tool's result in token arrays; None for Qwen3's. With `.npz` only.
        shuffle: deals a new order every time through the file; False keeps the file's.
        seed: of the order.

    Raises:
        ValueError: an argument out of range or without effect; RecordedDataError: data that cannot be used.
        DataFileError: no such file, or an environment variable that is not set.
    """

    def __init__(
        self,
        path: str,
        tokenizer: str | None = None,
        system: str | None = None,
        tasks: list[str | int] | None = None,
        trials: int | None = None,
        vocab_size: int | None = None,
        tool_response_id: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        is_text = not path.endswith(".npz")
        checks.at_least(1, {"TauPrompts.trials": trials, "TauPrompts.vocab_size": vocab_size})
        if is_text and tokenizer is None:
            raise ValueError(f"TauPrompts.tokenizer: '{path}' holds text; give the directory of a chat tokenizer")
        if is_text and tool_response_id is not None:
            raise ValueError("TauPrompts.tool_response_id has no effect on text, whose messages have roles; remove it")
        for key, text in (("tokenizer", tokenizer), ("system", system)):
            if not is_text and text is not None:
                raise ValueError(f"TauPrompts.{key} has no effect: '{path}' holds token ids already; remove it")
        from datamodules.conversations.selection import choose, first_trials, grouped

        self.path = resolve(path, "TauPrompts.path")
        self._vocab_size = vocab_size
        self._results: dict[str, list[int]] = {}  # source of a conversation -> tool results after each of its turns
        if is_text:
            conversations = self._read_text(str(tokenizer), system)
        else:
            conversations = self._read_arrays(TOOL_RESPONSE_ID if tool_response_id is None else tool_response_id)
        chosen = choose(grouped(conversations), tasks, str(self.path))
        self._groups = [first_trials(group, trials) for group in chosen.values()]
        self._order = DealingOrder(len(self._groups), shuffle, seed)

    @property
    def name(self) -> str:
        return self.path.name.split(".")[0]

    @property
    def size(self) -> int:
        return len(self._groups)

    def deal(self, index: int) -> Prompt:
        group = self._groups[self._order.at(index)]
        first = group[0]
        return Prompt(
            id=f"{self.name}:{first.task}" + (f" ({first.model})" if first.model else ""),
            metadata={"trials": [self._trial(one) for one in group]},
        )

    def _trial(self, one: Conversation) -> dict[str, Any]:
        tokens = one.tokens if self._vocab_size is None else one.tokens % self._vocab_size
        starts, ends = one.starts.tolist(), one.ends.tolist()
        follows = [*starts[1:], ends[-1]]
        turns = [
            {"tokens": end - start, "end": int(tokens[end - 1]), "after": tokens[end:following].tolist(), "results": n}
            for start, end, following, n in zip(starts, ends, follows, self._results[one.source], strict=True)
        ]
        return {"trial": one.trial, "reward": one.reward, "prompt": tokens[: starts[0]].tolist(), "turns": turns}

    def _read_arrays(self, tool_response_id: int) -> Sequence[Conversation]:
        from datamodules.conversations.tokens import load_npz

        conversations = load_npz(self.path)
        for one in conversations:
            follows = [*one.starts[1:].tolist(), int(one.ends[-1])]
            self._results[one.source] = [
                int((one.tokens[end:following] == tool_response_id).sum())
                for end, following in zip(one.ends.tolist(), follows, strict=True)
            ]
        return conversations

    def _read_text(self, tokenizer: str, system: str | None) -> Sequence[Conversation]:
        from datamodules.conversations.chat import ChatEncoder, load_chat_tokenizer, load_system, load_transcripts

        before = None if system is None else load_system(resolve(system, "TauPrompts.system"))
        encoder = ChatEncoder(load_chat_tokenizer(tokenizer, "TauPrompts.tokenizer"), before)
        conversations = []
        for transcript in load_transcripts(self.path):
            one = encoder.encode(transcript)
            steps = one.steps.tolist()
            self._results[one.source] = [
                sum(message["role"] == "tool" for message in transcript.messages[step:following])
                for step, following in zip(steps, [*steps[1:], steps[-1]], strict=True)
            ]
            conversations.append(one)
        return conversations
