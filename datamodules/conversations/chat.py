"""Recorded conversations as text (JSONL) and their token ids under a tokenizer's chat template.

Promises: a broken line is refused by file and line number, before anything is trained on; the token ids of a turn
follow exactly the prompt the template would have given the policy, tokenized as generation sees it (prompt and turn
apart, never merged across their boundary); trained tokens are those of assistant messages (but for those of weight 0),
up to and including the token with which the template ends the last turn (`eos_token` where it has none of its own), and
hold what was said, without another end or beginning of a turn; a template that does not show it, or shows what came
later within it, is refused, and so is one that leaves out tools or a message of anybody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.hub import check_reachable
from app.text import printable, reason, why_not
from datamodules.conversations.chat_template import HIDES_TOOLS, Chat
from datamodules.conversations.messages import as_recorded, check_messages, is_trained, tools_of
from datamodules.conversations.tokens import Conversation, is_reward
from datamodules.files.data_files import RecordedDataError
from datamodules.files.json_lines import parse_json, read_json_lines

THINK_TEXT = "<think>\n\n</think>\n\n"
_EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>\n*")  # its beginning may be the prompt's end


@dataclass(frozen=True)
class Transcript:
    """One conversation as text: its fields as in the JSONL file (see `load_transcripts`); source for errors.

    One that has a `completion` has no messages: its text was sampled behind that of `prompt`, by no template.
    `options` are further arguments of the template.
    """

    task: str
    trial: int
    model: str
    reward: float
    messages: list[dict[str, Any]]
    source: str
    tools: list[dict[str, Any]] | None = None
    is_rewarded: bool = True
    prompt: str = ""
    completion: str | None = None
    ended: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SystemPrompt:
    """What precedes every conversation of a file: the system prompt and the tools' JSON schemas."""

    text: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)


def load_transcripts(path: str | Path) -> list[Transcript]:
    """Reads a `.jsonl` or `.jsonl.gz` file, one conversation a line.

    A line holds `messages` and, if need be, `task_id` (default: the file's name and the line's number), `trial` (0),
    `model` (""), `reward`, `rewarded`, false where nobody said what it was worth (default: whether there is a reward),
    `tools`, JSON schemas in place of the system file's, as a list or its JSON text, and `chat_template_kwargs`, further
    arguments of the template; other keys are ignored, but for those that would be missed. A message is what
    `check_messages` says, or OpenAI's form of it (`as_recorded`).
    In place of messages there may be `prompt` and `completion`: messages of which the completion's alone are trained;
    or texts around which no template is put, and `ended`, false where the model did not end it (default true).

    Raises:
        RecordedDataError: naming file, line and field.
    """
    path = Path(path)
    result = [_parse(data, f"{path}:{number}") for number, data in read_json_lines(path)]
    if not result:
        raise RecordedDataError(
            f"{path}: no conversation in it; name another file in data.path, or make this one again"
        )
    return result


def load_system(path: str | Path) -> SystemPrompt:
    """Reads a `*_system.json` file: `system_prompt` and, if the policy had tools, `tools` (JSON schemas)."""
    try:
        data = parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise RecordedDataError(f"{path}: not valid JSON ({reason(error)}); make it again") from None
    if not isinstance(data, dict) or not isinstance(data.get("system_prompt"), str):
        raise RecordedDataError(f"{path}: 'system_prompt' must be a string")
    tools = data.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordedDataError(f"{path}: 'tools' must be a list of JSON schemas")
    return SystemPrompt(data["system_prompt"], tools)


def load_chat_tokenizer(spec: str, key: str = "tokenizer") -> PreTrainedTokenizerBase:
    """The tokenizer of directory (or hub name) `spec`; refused without a chat template or an end-of-turn token."""
    try:
        check_reachable(spec, "tokenizer_config.json")
        tokenizer = AutoTokenizer.from_pretrained(spec, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecordedDataError(f"{key}: no tokenizer could be loaded from '{spec}': {why_not(error, 500)}") from error
    if not tokenizer.chat_template:
        raise RecordedDataError(
            f"{key}: the tokenizer of '{spec}' has no chat_template; use an instruction-tuned model's"
        )
    if not tokenizer.eos_token:
        raise RecordedDataError(f"{key}: the tokenizer of '{spec}' has no eos_token; set the one that ends a turn")
    return tokenizer


class ChatEncoder:
    """Transcripts -> `Conversation`s under one tokenizer and system prompt.

    The conversation is rendered once, as history (with one more user message behind it, so that no turn is the last
    one: templates such as Qwen3's give the last turn an empty think block that was never recorded). Generated turn k
    begins where the template's generation prompt for the messages before it ends, and stops after the first
    end-of-turn token. Generation prompts that are not a beginning of the rendered history mean that the template
    rewrites earlier turns: refused, because no single sequence would hold such a conversation.

    Refused as well is a turn that does not hold the content of its message, thoughts included, and its calls (templates
    drop thoughts from history, or text beside a call), or that depends on what came after it (Gemma's holds the results
    of its calls). An empty think block that the template begins a turn with was said by nobody, and is not trained.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: SystemPrompt | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system or SystemPrompt()
        self._chat = Chat(tokenizer)
        closing = self._chat.closing
        self._end = tokenizer.eos_token if closing is None else str(tokenizer.convert_ids_to_tokens(closing))
        # GPT-OSS' template ends earlier turns otherwise than models do; rollouts keep what the model said.
        self._last = None if closing is None else self._chat.end

    def encode(self, transcript: Transcript) -> Conversation:
        """Tokens and turns of one transcript. Raises RecordedDataError naming its source and the message."""
        if transcript.completion is not None:
            return self._completion(transcript, transcript.completion)
        source, messages = transcript.source, transcript.messages
        tools = self.system.tools if transcript.tools is None else transcript.tools
        shown = {**transcript.options, "tools": tools or None}
        end_of_turn = self._end
        for k, message in enumerate(messages):
            for token in (end_of_turn, *(self._chat.turns if is_trained(message) else ())):
                where = next((key for key, value in message.items() if _spells(value, token)), None)
                if where is not None:
                    kind = "end-of-turn token" if token == end_of_turn else "template's token"
                    raise RecordedDataError(f"{source}: messages[{k}].{where} contains the {kind} '{token}': remove it")
        after: dict[str, Any] = {"role": "user", "content": "."}
        chat = [_for_template(message, self._chat) for message in messages]
        others = [_for_template(_changed(message), self._chat) for message in [*messages, after]]
        if self.system.text:
            if messages[0]["role"] == "system":
                raise RecordedDataError(
                    f"{source}: messages[0] is a system message, and data.system is another; leave one of them out"
                )
            chat.insert(0, {"role": "system", "content": self.system.text})
        shift = len(chat) - len(messages)
        text = self._render([*chat, after], shown, False, source, len(messages))
        self._check_shown(chat, after, shown, source)

        tokens: list[int] = []
        starts, ends, steps = [], [], []
        done = 0
        for k, message in enumerate(messages):
            if not is_trained(message):
                continue
            prompt = self._render(chat[: k + shift], shown, True, source, k)
            end = text.find(end_of_turn, len(prompt))
            if not text.startswith(prompt) or len(prompt) < done:
                other = ", or leave chat_template_kwargs out (enable_thinking: false is workload: think)"
                raise RecordedDataError(
                    f"{source}: messages[{k}]: the chat template rewrites the conversation before this turn, so its "
                    "prompt is no beginning of the whole; use one whose history does not depend on later messages"
                    + (other if transcript.options else "")
                )
            if end < 0:
                raise RecordedDataError(
                    f"{source}: messages[{k}]: no '{end_of_turn}' follows the rendered turn, and the chat template "
                    "ends it with no other token; set tokenizer.eos_token to what ends a turn in it"
                )
            turn, whole = text[len(prompt) : end], text[: end + len(end_of_turn)]
            begin, why = _said_from(turn, prompt, message), ""
            if begin is None:
                begin, why = 0, "does not show all that was said"
            elif turn[begin:].strip() != message["content"].strip():  # else there is no room for what came later
                another = [*chat[: k + shift + 1], *others[k + 1 :]]
                if not self._render(another, shown, False, source, len(messages)).startswith(whole):
                    why = "puts what came later into this turn"
            if why:
                raise RecordedDataError(
                    f"{source}: messages[{k}]: the chat template {why}, so it would be trained as something else; use"
                    " another template, give the message weight 0, or remove thoughts (<think>) from its content"
                )
            begin += len(prompt)
            tokens += self._encode(text[done:begin], behind=end_of_turn if done else "")
            starts.append(len(tokens))
            done = len(whole)
            tokens += self._reply(text[begin:done], text[max(begin - 1, 0) : begin])
            if self._last is not None:
                tokens[-1] = self._last
            ends.append(len(tokens))
            steps.append(k)
        return Conversation(
            task=transcript.task,
            trial=transcript.trial,
            model=transcript.model,
            reward=transcript.reward,
            source=source,
            tokens=np.array(tokens, np.int64),
            starts=np.array(starts, np.int64),
            ends=np.array(ends, np.int64),
            steps=np.array(steps, np.int64),
        )

    def _check_shown(
        self, chat: list[dict[str, Any]], after: dict[str, Any], shown: dict[str, Any], source: str
    ) -> None:
        """Raises RecordedDataError where the template leaves out tools, or what anybody but the assistant said."""
        if (tools := shown["tools"]) and not self._chat.visible.tools(chat[0]["role"] == "system"):
            raise RecordedDataError(
                f"{source}: the chat template {HIDES_TOOLS}, and the conversation has {len(tools)}; use another"
                " template, or describe them in the system message and leave tools out"
            )
        marked = [
            one if one["role"] == "assistant" else {**one, "content": f"{one['content']}@@{k}@@"}
            for k, one in enumerate(chat)
        ]
        text = self._render([*marked, after], shown, False, source, len(chat))
        for k, one in enumerate(chat):
            if one["role"] != "assistant" and f"@@{k}@@" not in text:
                raise RecordedDataError(
                    f"{source}: the chat template does not show the message of role {one['role']} that is number"
                    f" {k + 1} of the conversation; use another template, or say it in a role that it shows"
                )

    def _reply(self, said: str, before: str) -> list[int]:
        """Its tokens as they are generated. `before`: the character in front of it, without which tokenizers of Llama
        2's kind put a space there."""
        alone, joined = self._encode(before), self._encode(before + said)
        return joined[len(alone) :] if before and joined[: len(alone)] == alone else self._encode(said)

    def _completion(self, transcript: Transcript, said: str) -> Conversation:
        """No template, no system prompt, no BOS: as gateways send it. `eos_token` ends it."""
        prompt = self._encode(transcript.prompt)
        tokens = prompt + self._encode(said) + [self.tokenizer.eos_token_id] * transcript.ended
        starts, ends, steps = (np.array([one], np.int64) for one in (len(prompt), len(tokens), 0))
        return Conversation(
            transcript.task,
            transcript.trial,
            transcript.model,
            transcript.reward,
            transcript.source,
            np.array(tokens, np.int64),
            starts,
            ends,
            steps,
        )

    def think_ids(self) -> list[int]:
        """An empty think block in this tokenizer's ids."""
        return self._encode(THINK_TEXT)

    def _encode(self, text: str, behind: str = "") -> list[int]:
        """`behind`: the token before it, which in some tokenizers takes white space behind it along."""
        tokens: list[int] = self.tokenizer.encode(behind + text, add_special_tokens=False)
        return tokens[1:] if behind else tokens

    def _render(
        self, chat: list[dict[str, Any]], shown: dict[str, Any], generation_prompt: bool, source: str, k: int
    ) -> str:
        render: Callable[..., Any] = self.tokenizer.apply_chat_template
        try:
            return render(chat, tokenize=False, add_generation_prompt=generation_prompt, **shown)
        except Exception as error:  # templates raise whatever they like
            raise RecordedDataError(
                f"{source}: the chat template cannot render the conversation up to messages[{k}]: {reason(error)}"
            ) from error


def _parse(data: dict[str, Any], source: str) -> Transcript:
    data = {key: value for key, value in data.items() if value is not None}  # columns of tables have nulls
    named: dict[str, Any] = {
        "task_id": Path(source).name,
        "trial": 0,
        "reward": 0.0,
        "rewarded": "reward" in data,
        **data,
    }
    for name, want, good in (
        ("task_id", "a string", isinstance(named["task_id"], str | int)),
        ("trial", "an integer from 0 up", type(named["trial"]) is int and named["trial"] >= 0),
        ("reward", "a finite number", is_reward(named["reward"]) and ("reward" in data or not named["rewarded"])),
        ("rewarded", "true or false", isinstance(named["rewarded"], bool)),
        ("ended", "true or false", isinstance(data.get("ended", True), bool)),
        ("chat_template_kwargs", "an object", isinstance(data.get("chat_template_kwargs", {}), dict)),
    ):
        if not good:
            got = printable(repr(data[name]), 40) if name in data else "nothing"
            raise RecordedDataError(f"{source}: '{name}' must be {want}, got {got}; correct or remove the line")
    if data.get("functions"):
        raise RecordedDataError(
            f"{source}: 'functions', the older form of tools, would be left out; write each of them into 'tools' as"
            ' {"type": "function", "function": ...}'
        )
    prompt, completion = data.get("prompt"), data.get("completion")
    completes = isinstance(prompt, str) and isinstance(completion, str)
    if "completion" in data and not completes and not (isinstance(prompt, list) and isinstance(completion, list)):
        raise RecordedDataError(
            f"{source}: 'prompt' and 'completion' must be texts, or lists of messages; correct or remove the line"
        )
    return Transcript(
        task=str(named["task_id"]),
        trial=named["trial"],
        model=str(data.get("model", "")),
        reward=float(named["reward"]),
        messages=[] if completes else check_messages(_messages(data, source), source),
        source=source,
        tools=tools_of(data.get("tools"), source),
        is_rewarded=named["rewarded"],
        prompt=str(prompt) if completes else "",
        completion=str(completion) if completes else None,
        ended=data.get("ended", True),
        options=data.get("chat_template_kwargs", {}),
    )


def _messages(data: dict[str, Any], source: str) -> Any:
    """Those of a line in the form of recordings; of a prompt and its completion those of the completion are trained."""
    if "completion" in data:
        told = [{**one, "weight": 0} if _is_assistant(one) else one for one in data["prompt"]]
        messages = [*told, *data["completion"]]
    elif "messages" not in data:
        raise RecordedDataError(
            f"{source}: no 'messages' in the line, which has {printable(', '.join(data) or 'nothing', 200)};"
            " docs/agents.md (Conversations that you have) has a line of Python for other forms"
        )
    else:
        messages = data["messages"]
    return list(map(as_recorded, messages)) if isinstance(messages, list) else messages


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _spells(value: Any, token: str) -> bool:
    """Whether any text in a field of a message holds the token's."""
    if isinstance(value, dict):
        return any(_spells(one, token) for one in (*value, *value.values()))
    return any(_spells(one, token) for one in value) if isinstance(value, list) else token in str(value)


def _said_from(shown: str, prompt: str, message: dict[str, Any]) -> int | None:
    """Where in `shown`, its turn behind `prompt`, begins what was said; None where some of it, but for white space, is
    missing."""
    content = message["content"].strip()
    if prompt.rstrip().endswith("<think>"):
        content = content.removeprefix("<think>")
    begin = 0
    if empty := _EMPTY_THINK.match(shown):
        if "</think>" not in content:
            begin = empty.end()
        elif not _squeezed(shown).startswith(_squeezed(content)):  # thoughts behind a block that is closed
            return None
    unthought = _EMPTY_THINK.match(content)  # nothing is lost where history has no empty block
    said, rest = _squeezed(content[unthought.end() :] if unthought else content), _squeezed(shown[begin:])
    if said not in rest:
        return None
    rest = rest.replace(said, "", 1)  # it may speak of the call
    for name in (_squeezed(call["name"]) for call in message.get("tool_calls", [])):
        if name not in rest:
            return None
        rest = rest.replace(name, "", 1)
    return begin


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _changed(message: dict[str, Any]) -> dict[str, Any]:
    """Another message of the same form."""
    calls = [{**call, "name": call["name"] + "_"} for call in message.get("tool_calls", [])]
    return {**message, "content": message["content"] + ".", "tool_calls": calls}


def _for_template(message: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """A message in the form chat templates expect (OpenAI's): calls under `function`, results with `tool_call_id`."""
    result = {"role": message["role"], "content": message["content"]}
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {
                "type": "function",
                "id": call.get("id", ""),
                "function": {"name": call["name"], "arguments": chat.arguments(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    if "name" in message:
        result["name"] = message["name"]
    if message["role"] == "tool" and (answered := message.get("id", message.get("tool_call_id"))) is not None:
        result["tool_call_id"] = answered
    return result
