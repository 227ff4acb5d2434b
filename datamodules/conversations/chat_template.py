"""A tokenizer's chat template, as conversations of several turns need it: a beginning, and what follows a reply.

Promises: what follows a reply is exactly what the template puts there, the end of the turn included where the reply
was cut off before it, and not said again where the reply ended with it, whatever `eos_token` is; the reply itself is
not looked at again. A template that cannot do so is refused by name. A text is what transformers renders, in a half
to a seventh of its time where there are many messages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, lru_cache
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext, missing
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from datamodules.conversations.messages import with_arguments
from datamodules.conversations.resumed_template import Renderings, ResumableTemplate

Message = dict[str, Any]

HIDES_TOOLS = "does not show tools to the model"
"""What is said of a template that leaves them out."""
_PROBE = {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _PROBE}]
_REPLY = "@@reply@@"  # stands for a reply in a rendered conversation
_ASKED, _SYSTEM = {"role": "user", "content": "."}, {"role": "system", "content": "."}
_OF_REPLIES = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # marks that say nothing of who speaks
_MOST_OF_MARKS = 16  # tokens that a mark and the white space behind it may be
_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset(name for name in dir(LoopContext) if isinstance(getattr(LoopContext, name), property | int))
_METHODS = (MethodType, BuiltinMethodType)
_WRAPPED = ("format", "format_map")  # a text's are others in a sandbox
_REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))  # transformers shows one under other names too
_OF_TRANSFORMERS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
_PRIVATE = ("_compile_jinja_template", "_plain_template_data", "_alias_reasoning_fields")
_IS_KNOWN = all(hasattr(chat_template_utils, name) for name in _PRIVATE)  # this release's way to render
_MOST_KNOWN = 4096  # pairs of a type and an attribute; names may come from messages


class Chat:
    """Messages to token ids.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas the template shows to the model, None for none.
        options: further arguments of the template, such as `{"enable_thinking": False}`.

    Raises:
        ValueError: no chat template, or one that takes no notice of the tools.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: list[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError("tokenizer: it has no chat template, which this workflow needs; use a chat model's")
        self._tokenizer = tokenizer
        self._tools = tools
        self._options = options or {}
        # Not of tokenizers that render by themselves, nor with options that are none of the template's.
        theirs = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        self._is_ordinary = theirs and _IS_KNOWN and not self._options.keys() & _OF_TRANSFORMERS
        # By id: whatever is no piece of text. Families differ in which of these they mark as special; words are text.
        added = {
            token: str(one)
            for token, one in tokenizer.added_tokens_decoder.items()
            if str(one).strip() and (one.special or not str(one).strip().isalnum())
        }
        self._marks = {*tokenizer.all_special_ids, *added}
        special = (str(one) for one in tokenizer.added_tokens_decoder.values() if one.special)
        written = tokenizer.chat_template  # by name where there are several
        source = "".join(written.values()) if isinstance(written, dict) else str(written)
        # Of the others those that look like marks: line feeds, commas and words of a vocabulary are ordinary text.
        marks = (one for one in added.values() if re.fullmatch(r"<.+>|\[.+\]", one))
        shown = (one for one in marks if one in source and one not in _OF_REPLIES)
        self._special = [token for token in {*tokenizer.all_special_tokens, *special, *shown} if len(token) > 1]
        if tools:
            probe = [{"role": "user", "content": "."}]
            if self.text(probe, tools) == self.text(probe, None):
                raise ValueError(
                    f"tokenizer: its chat template {HIDES_TOOLS}; use a model whose template does, or"
                    " describe them in the prompts' system message and set show_tools: false"
                )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A whole conversation, its calls as `arguments`, up to the next reply. Raises ValueError as `after_reply`."""
        return self.encode(self.text([with_arguments(one, self.arguments) for one in messages], self._tools))

    def after_reply(
        self, messages: Sequence[Message], last: int | None = None, ends: Collection[int] = ()
    ) -> list[int]:
        """What comes between a reply and the next one when `messages` do.

        Args:
            messages: what the model is told.
            last: the reply's own last token where that ended it, None where the reply was cut off: then the template's
                end of turn comes first.
            ends: tokens that end a turn as the template's own does, which is not said after them.

        Raises:
            ValueError: the template cannot render them, does not show what the assistant said, or text the tokenizer
                has no tokens for.
        """
        after = self._after(messages, goes_on=True)
        closing = self._closing(after)
        if last in after[: max(closing, 1)]:
            return after[after.index(last) + 1 :]
        return after[closing:] if last in ends else after

    @cached_property
    def end(self) -> int | None:
        """The token with which the template says that a reply is over, None where it has no such token.

        It is the one behind the last reply of a conversation: GPT-OSS' differs from the one behind earlier replies.
        Where nothing is behind the last one, it is what begins the next message (GLM's `<|user|>`).
        """
        after = self._probe()
        shared = self._closing(after)
        final = [token for token in self._final if token in self._marks]
        if after[:shared] == self._final[:shared] and shared:
            return after[shared - 1]
        return final[0] if final else next((token for token in after[:1] if token in self._marks), None)

    @cached_property
    def closing(self) -> int | None:
        """The token that the template puts behind a reply once the conversation went on; None for no such token."""
        after = self._probe()
        count = self._closing(after)
        return after[count - 1] if count else None

    @cached_property
    def turns(self) -> tuple[str, ...]:
        """Tokens, as text, that end a reply or begin a message: what no reply can say."""
        found = dict.fromkeys([*self._probe(), *self._final, self._tokenizer.eos_token_id])
        named = self._tokenizer.convert_ids_to_tokens([token for token in found if token in self._marks])
        return tuple(str(one) for one in named if one not in _OF_REPLIES)

    def opened(self, tokens: Sequence[int], reply: int = 0) -> str:
        """`<think>` where these ids but the last `reply`, which answer the others, end with it, so that the model only
        closes the thought.

        Templates open one depending on the conversation: not behind a tool's result, say.
        """
        end = len(tokens) - reply
        said = str(self._tokenizer.decode(list(tokens[max(0, end - _MOST_OF_MARKS) : end]), skip_special_tokens=False))
        return "<think>" if said.rstrip().endswith("<think>") else ""

    def _probe(self) -> list[int]:
        try:
            return self._after([{"role": "user", "content": "."}], goes_on=True)
        except ValueError:  # said by whoever renders a conversation
            return []

    @cached_property
    def _final(self) -> list[int]:
        """What the template puts behind the last reply of a conversation."""
        try:
            return self._after([], goes_on=False)
        except ValueError:
            return []

    def _closing(self, after: Sequence[int]) -> int:
        """Tokens at the beginning of `after` that close the reply, up to its end of turn; 0 for a template without."""
        shared = 0
        while shared < min(len(after), len(self._final)) and after[shared] == self._final[shared]:
            shared += 1
        while shared and after[shared - 1] not in self._marks:
            shared -= 1
        if shared == 0 and self._marks & {*self._final} and self._marks & {*after[:1]}:
            return 1  # another end of turn than behind the last reply
        return shared

    def _after(self, messages: Sequence[Message], goes_on: bool) -> list[int]:
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": _REPLY}]
        _before, found, after = self.text([*said, *messages], None, goes_on).partition(_REPLY)
        if not found:
            raise ValueError(
                "tokenizer: its chat template does not show what the assistant said; set sequences: rendered"
            )
        # The end of turn is encoded with what follows: some tokenizers let it take the line break behind it along.
        return self.encode(after) if after else []

    def shows(self, role: str) -> bool:
        """Whether messages of `role` that follow a reply are in what the template makes of them."""
        said = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        return _REPLY in self.text([*said, {"role": role, "content": _REPLY}], None)

    @cached_property
    def visible(self) -> Visible:
        """What the template shows of tools."""
        return Visible(self)

    def quoted(self, text: str) -> str:
        """`text` with a space in each token it spells that is special, or with which the template marks roles and
        results: what a tool returns cannot end its own message."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def arguments(self, given: Any) -> Any:
        """The arguments of a call as the template takes them: the object, or its JSON text (DeepSeek V3's)."""
        return given if self._takes_objects or isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    @cached_property
    def _takes_objects(self) -> bool:
        for arguments in (dict[str, Any](), "{}"):
            try:
                self.text(_calling("probe", arguments), None, False)
            except ValueError:
                continue
            return not isinstance(arguments, str)
        return True

    def written_call(self, name: str, arguments: dict[str, Any]) -> str:
        """A reply that is this call, as the template writes it where it shows earlier ones; "" where it does not."""
        asked, reply = _calling(name, self.arguments(arguments))
        try:
            shown, prompt = self.text([asked, reply], None, False), self.text([asked], None)
            begins = (prompt, prompt.rpartition("<think>")[0] or prompt, self.text([asked], None, False))
        except ValueError:
            return ""
        begin = next((one for one in begins if shown.startswith(one)), "")
        said = shown[len(begin) :]
        for end in (self._tokenizer.eos_token_id, self.end, self.closing):
            said = said if end is None else said.partition(str(self._tokenizer.convert_ids_to_tokens(end)))[0]
        if name not in said:
            return ""
        return f"<think>{said}" if begin.rstrip().endswith("<think>") else said

    def shown(self, message: Message) -> Message:
        """The message as the template is shown it: what `text` makes of each, for messages that it is given often."""
        return _as_shown(message) if self._is_ordinary else message

    def text(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        goes_on: bool = True,
        past: Renderings | None = None,
    ) -> str:
        """What the template makes of `messages` and `tools`. Raises ValueError when it cannot.

        Args:
            messages, tools: of the conversation.
            goes_on: up to where the next reply begins.
            past: renderings that this one may go on from; it is added. The messages are what `shown` has made of them,
                then, the same objects each time.
        """
        slow: Callable[..., Any] = self._tokenizer.apply_chat_template
        ordinary = self._is_ordinary and messages and all(type(one) is dict for one in tools or ())
        try:
            if ordinary:
                said = [_as_shown(one) for one in messages] if past is None else list(messages)
                return self._rendered(said, tools, goes_on, past)
            return str(
                slow(list(messages), tools=tools, tokenize=False, add_generation_prompt=goes_on, **self._options)
            )
        except Exception as error:  # templates raise whatever they like
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
            raise ValueError(
                f"tokenizer: its chat template cannot render messages of the roles {roles}: {error}"
            ) from error

    def _rendered(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, goes_on: bool, past: Renderings | None
    ) -> str:
        """As `apply_chat_template` does it."""
        source = self._tokenizer.get_chat_template(None, tools)
        special = self._tokenizer.special_tokens_map
        plain = chat_template_utils._plain_template_data
        known = {
            **special,
            **plain(self._options),
            "messages": messages,
            "documents": None,
            "add_generation_prompt": goes_on,
        }
        template = None if past is None else _resumable(source)
        if past is None or template is None:
            return _hastened(source).render({**known, "tools": plain(tools)})
        about = (source, goes_on, repr(tools), repr(special))  # repr tells 1 from 1.0
        found = past.tools(about)
        return past.text(template, {**known, "tools": plain(tools) if found is None else found}, about)

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text. Raises ValueError when the tokenizer has none for it."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"tokenizer: it cannot encode {text[:80]!r}: {error}") from error


class Visible:
    """Which of an agent's means a template shows: all if it cannot render the question, which it says itself."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._known: dict[tuple[Any, ...], bool] = {}

    def tools(self, system: bool) -> bool:
        """Tools, in conversations that begin with a message of the system's or not."""
        said = [_SYSTEM, _ASKED] if system else [_ASKED]
        return self._found(("tools", system), lambda: self._chat.text(said, _TOOLS) != self._chat.text(said, None))

    def systems(self, begin: int, behind: int, asked: bool, tools: bool) -> bool:
        """All messages of the system: so many in front, and behind one of the user's where it is `asked`."""
        marks, shown = [f"{_REPLY}{k}" for k in range(begin + behind)], _TOOLS if tools else None
        told = [{"role": "system", "content": mark} for mark in marks]
        said = [*told[:begin], *[_ASKED] * asked, *told[begin:]]

        def look() -> bool:
            return {*marks} <= {*re.findall(rf"{_REPLY}\d", self._chat.text(said, shown))}

        return self._found(("systems", begin, behind, asked, tools), look)

    def calls(self, tools: bool) -> bool:
        """Earlier calls, where there are tools beside them or not."""
        shown = _TOOLS if tools else None
        return self._found(("calls", tools), lambda: _REPLY in self._chat.text(self._called(_REPLY), shown, False))

    def results(self, tools: bool) -> bool:
        """What tools have returned, as `calls`."""
        result = {"role": "tool", "tool_call_id": "call00001", "name": "probe", "content": _REPLY}
        said, shown = [*self._called("probe"), result], _TOOLS if tools else None
        return self._found(("results", tools), lambda: _REPLY in self._chat.text(said, shown))

    def names(self) -> bool:
        """Who a message of the user's is from (`name`)."""
        return self._found(("names",), lambda: _REPLY in self._chat.text([{**_ASKED, "name": _REPLY}], None))

    def _called(self, name: str) -> list[Message]:
        return _calling(name, self._chat.arguments({}))

    def _found(self, what: tuple[Any, ...], look: Callable[[], bool]) -> bool:
        if what not in self._known:
            try:
                self._known[what] = look()
            except ValueError:
                self._known[what] = True
        return self._known[what]


def _calling(name: str, arguments: Any) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _as_shown(message: Message) -> Message:
    """The message as transformers shows it to templates: of plain data, without what is None."""
    if type(message) is dict and not _REASONING & message.keys():
        for key, value in message.items():
            if type(key) is not str or type(value) is not str:
                break
        else:
            return message  # a sandboxed template changes nothing
    said = {key: value for key, value in message.items() if value is not None}
    (shown,) = chat_template_utils._alias_reasoning_fields([chat_template_utils._plain_template_data(said)])
    return shown


@lru_cache(maxsize=64)
def _hastened(source: str) -> Template:
    """The template, compiled in a sandbox of transformers' that is in haste."""
    environment = chat_template_utils._compile_jinja_template(source).environment
    hasten(environment)
    return environment.from_string(source)


@lru_cache(maxsize=64)
def _resumable(source: str) -> ResumableTemplate | None:
    """None where no loop can be resumed."""
    found = ResumableTemplate(_hastened(source).environment, source)
    return found if found.loops else None


class _Quick(CodeGenerator):
    """Code that looks into dicts and loops by itself, and leaves a loop that has found what it sought.

    What else has attributes is the environment's.
    """

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        flag = _sought(node)
        if flag is not None:
            found = nodes.If(nodes.Not(flag), [nodes.Break()], [], [])
            node.body[-1].else_ = [found.set_lineno(node.lineno)]  # type: ignore[attr-defined]
            node.set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if not isinstance(node.node, nodes.Name) or self.environment.is_async:
            super().visit_Getattr(node, frame)
            return
        name, key = frame.symbols.ref(node.node.name), repr(node.attr)
        if node.node.name == "loop" and node.attr in _OF_LOOPS:
            self.write(f"({name}.{node.attr} if type({name}) is LoopContext else ")
        elif node.attr not in _OF_DICTS:
            self.write(f"({name}[{key}] if type({name}) is dict and {key} in {name} else ")
        else:
            self.write("(")
        super().visit_Getattr(node, frame)
        self.write(")")


def _sought(loop: nodes.For) -> nodes.Getattr | None:
    """The flag of a loop over a slice that does nothing once it is false: `{% if ns.flag and ... %}` and no else.

    Qwen's templates seek the last question so, from the end to the beginning. In front of it there may be names that
    such a loop gives to sums of numbers, which are gone at the end of each round and cannot fail in a later one.
    """
    over = loop.iter
    if loop.recursive or loop.test or not isinstance(over, nodes.Getitem) or not isinstance(over.arg, nodes.Slice):
        return None
    *before, last = [one for one in loop.body if not _is_blank(one)] or [loop]
    if not isinstance(last, nodes.If) or last is not loop.body[-1] or last.elif_ or last.else_:
        return None
    flag: nodes.Node = last.test
    while isinstance(flag, nodes.And):
        flag = flag.left
    if not isinstance(flag, nodes.Getattr) or not isinstance(flag.node, nodes.Name):
        return None
    own = {"loop", *(name.name for name in loop.target.find_all(nodes.Name))}
    own |= {loop.target.name} if isinstance(loop.target, nodes.Name) else set()
    for one in before:
        if not isinstance(one, nodes.Assign) or not isinstance(one.target, nodes.Name) or not _is_number(one.node):
            return None
        own.add(one.target.name)
    return None if flag.node.name in own else flag


def _is_blank(node: nodes.Node) -> bool:
    said = node.nodes if isinstance(node, nodes.Output) else [node]
    return all(isinstance(one, nodes.TemplateData) and not one.data for one in said)


def _is_number(node: nodes.Node) -> bool:
    """Of whole numbers, lengths of names and the loop's count."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, nodes.Filter):
        return node.name == "length" and isinstance(node.node, nodes.Name) and not node.args and not node.kwargs
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in ("index", "index0")
    return isinstance(node, nodes.Const) and type(node.value) is int


def hasten(environment: SandboxedEnvironment) -> None:
    """Makes templates of this sandbox look attributes up in a fraction of the time, with the same results.

    Most of a rendering is `message.role` and its like. The sandbox asks Python for an attribute of that name first, and
    makes an exception of its absence; of what has one it asks several abstract classes whether it may be seen. For a
    plain dict the former is known beforehand, and the latter depends on the object's type and the name alone.
    Templates that are compiled from here on have the commonest of these look-ups in their own code.
    """
    if "getattr" in vars(environment):
        return
    look_up, is_safe = environment.getattr, environment.is_safe_attribute
    known: dict[tuple[type, str], bool] = {}

    @lru_cache(maxsize=_MOST_KNOWN)
    def absent(attribute: str) -> Undefined:  # of the dict it tells the type alone
        return environment.undefined(obj={}, name=attribute)

    def is_safe_attribute(obj: Any, attr: str, value: Any) -> bool:
        found = known.get((type(obj), attr))
        if found is None:
            found = is_safe(obj, attr, value)
            if len(known) < _MOST_KNOWN:
                known[type(obj), attr] = found
        return found

    def get(obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _OF_DICTS:
            value = obj.get(attribute, missing)
            return absent(attribute) if value is missing else value
        if isinstance(obj, Namespace):
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute, missing)
            found = value is not missing and not attribute.startswith("_")
        elif found := bool(known.get((type(obj), attribute))):
            value = getattr(obj, attribute, missing)
            found = value is not missing
        if found and (not isinstance(value, _METHODS) or value.__name__ not in _WRAPPED):
            return value
        return look_up(obj, attribute)

    vars(environment).update(getattr=get, is_safe_attribute=is_safe_attribute, code_generator_class=_Quick)
