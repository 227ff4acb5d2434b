"""Chat templates that go on where an earlier rendering of the same conversation can be taken over.

A template loops over all messages, at every call. What its body says of a message is a function of that message, of the
variables that it reads from outside, and of what earlier rounds have left in namespaces (Jinja's other assignments end
with the round). So rounds whose messages are the same objects as before, and which found the same outside, need not be
run again: their text is known, and so are the namespaces behind them.

Promises: a text is what the template would render anew, to the character. Which rounds are taken over is proven for
each loop from the template's syntax and from the values it meets; a loop that reads anything else (the number of
messages, one from the end, the clock) runs whole. An index that is only compared with the round's own, as that of the
last question is, may differ behind the rounds that are taken over. Messages and tools must not be changed afterwards.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Any

from jinja2 import Environment, Template, Undefined, nodes
from jinja2.runtime import LoopContext, Macro, missing
from jinja2.utils import Namespace

_BEGIN, _STEP, _AT = "_resumed_begin", "_resumed_step", "_resumed_at"
_MESSAGES = "messages"
_OF_ROUNDS = frozenset(("first", "last", "index", "index0", "previtem", "nextitem"))
_PURE = frozenset(("range", "dict", "namespace", "raise_exception"))  # globals that say the same each time
_ELSEWHERE = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.ContextReference,
    nodes.DerivedContextReference,
    nodes.EvalContextModifier,
    nodes.ScopedEvalContextModifier,
)
_PLAIN = frozenset((str, int, bool, type(None)))
_MOST = 4  # conversations of a session that are gone on with in turns


@dataclass
class _Reads:
    """What a loop's body, and macros, read and change outside.

    Attributes:
        whole: names that are used as such. indexed: of which an element is taken by a computed index.
        attributes: that are read of names, otherwise than `compared` with the round's index.
        written: by name, attributes that are assigned.
        known: nothing else is read that could differ.
    """

    whole: set[str] = field(default_factory=set)
    indexed: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    written: dict[str, set[str]] = field(default_factory=dict)
    known: bool = True

    def read(self, node: nodes.Node, impure: Collection[str], is_own: bool = True) -> None:
        """Adds what a part of a body reads.

        Args:
            node: that part.
            impure: names of what says something else each time.
            is_own: the name "loop" is that of the loop itself.
        """
        if isinstance(node, nodes.Name):
            self.known &= not (node.name == "loop" and is_own) and node.name not in impure
            if node.ctx == "load":
                self.whole.add(node.name)
        elif isinstance(node, nodes.NSRef):
            self.written.setdefault(node.name, set()).add(node.attr)
        elif isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
            name = node.node.name
            self.known &= name not in (*impure, _MESSAGES) and (name != "loop" or not is_own or node.attr in _OF_ROUNDS)
            self.attributes.add(node.attr)
            if hasattr(list, node.attr):  # an alias of the messages might be asked for it
                self.whole.add(name)
        elif isinstance(node, nodes.Compare) and is_own and (attribute := _beside_index(node)):
            self.compared.add(attribute)
        elif _is_indexed(node):
            self.indexed.add(node.node.name)  # type: ignore[attr-defined]
            self.read(node.arg, impure, is_own)  # type: ignore[attr-defined]
        elif isinstance(node, nodes.For):
            for one in (node.iter, node.test, *node.else_):  # there, "loop" is still that around it
                if one is not None:
                    self.read(one, impure, is_own)
            for one in (node.target, *node.body):
                self.read(one, impure, is_own=False)
        else:
            self.known &= not isinstance(node, _ELSEWHERE)
            for one in node.iter_child_nodes():
                self.read(one, impure, is_own)


def _beside_index(node: nodes.Compare) -> str:
    """The attribute of a name that is compared with `loop.index0`; "" where something else is."""
    if len(node.ops) != 1:
        return ""
    sides = [node.expr, node.ops[0].expr]
    if not all(isinstance(one, nodes.Getattr) and isinstance(one.node, nodes.Name) for one in sides):
        return ""
    found = [(one.node.name, one.attr) for one in sides]  # type: ignore[attr-defined]
    if node.ops[0].op in ("in", "notin") or found.count(("loop", "index0")) != 1:
        return ""
    name, attribute = found[found[0] == ("loop", "index0")]
    return "" if name == "loop" else str(attribute)


def _is_indexed(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.node, nodes.Name)
        and node.node.name != "loop"
        and not isinstance(node.arg, nodes.Slice)
        and not (isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str))
    )


@dataclass(frozen=True)
class _Loop:
    """A loop that may be resumed.

    Attributes:
        names: variables of the template that its body may read.
        whole: of which it uses more than attributes and single elements. indexed: of which it uses such elements.
        written: by name, attributes of namespaces that rounds may change.
        compared: attributes that are only compared with the round's index.
    """

    names: tuple[str, ...]
    whole: frozenset[str]
    indexed: frozenset[str]
    written: dict[str, tuple[str, ...]]
    compared: frozenset[str]


class ResumableTemplate:
    """A template and which of its loops can be resumed.

    Args:
        environment: that compiles it; a sandbox in which nothing is changed but namespaces.
        source: of the template.

    Attributes:
        loops: by their number.
    """

    def __init__(self, environment: Environment, source: str) -> None:
        self.loops: dict[int, _Loop] = {}
        self._impure = frozenset(environment.globals).difference(_PURE) | {"self", "super"}
        self._environment = environment
        tree = environment.parse(source)
        self._macros = list(tree.find_all(nodes.Macro))
        if "_resumed" not in source and "random" not in source:
            self._find(tree.body, set())
        tree.set_environment(environment)
        self._template: Template = environment.from_string(tree)

    def _find(self, body: Sequence[nodes.Node], stored: set[str]) -> None:
        """Changes the loops in it that can be resumed; `stored` are the template's variables up to there."""
        for node in body:
            if isinstance(node, nodes.Assign):
                stored |= {name.name for name in node.find_all(nodes.Name) if name.ctx == "store"}
            elif isinstance(node, nodes.AssignBlock) and isinstance(node.target, nodes.Name):
                stored.add(node.target.name)
            elif isinstance(node, nodes.Macro):
                stored.add(node.name)
            elif isinstance(node, nodes.If):
                branches = [node.body, *(one.body for one in node.elif_), node.else_]
                after = [set(stored) for _ in branches]
                for one, known in zip(branches, after, strict=True):
                    self._find(one, known)
                stored |= set[str]().union(*after)
            elif isinstance(node, nodes.For):
                self._change(node, stored)

    def _change(self, node: nodes.For, stored: set[str]) -> None:
        over: nodes.Node = node.iter
        if isinstance(over, nodes.Getitem) and isinstance(over.arg, nodes.Slice) and over.arg.step is None:
            over = over.node
        if not isinstance(over, nodes.Name) or node.recursive or node.test or node.else_:
            return
        reads = _Reads()
        for one in node.body:
            reads.read(one, self._impure)
        for macro in self._macros:
            of_macro = _Reads()
            for one in (*macro.defaults, *macro.body):
                of_macro.read(one, self._impure, is_own=False)
            reads.whole |= of_macro.whole | of_macro.indexed
            reads.attributes |= of_macro.attributes
            reads.known &= of_macro.known
            for name, attributes in of_macro.written.items():
                reads.written.setdefault(name, set()).update(attributes)
        if not reads.known or {_MESSAGES, over.name} & reads.whole:
            return
        of_names = set(reads.written)
        for part in (node, *self._macros):
            of_names |= {one.name for one in part.find_all(nodes.Name)}
        names = tuple(sorted(stored & of_names))
        changed = set[str]().union(*reads.written.values())
        number = len(self.loops)
        self.loops[number] = _Loop(
            names,
            frozenset(reads.whole),
            frozenset(reads.indexed),
            {name: tuple(sorted(found)) for name, found in reads.written.items() if name in names},
            frozenset(reads.compared - reads.attributes - changed),
        )
        for one in node.body:
            _look_up_by_call(one, {_MESSAGES, *stored})
        step = nodes.ExprStmt(_call(_STEP, nodes.Name("loop", "load")))
        given = [nodes.Const(number), node.iter, *(nodes.Name(name, "load") for name in names)]
        node.iter = _call(_BEGIN, *given).set_lineno(node.lineno)
        node.body.insert(0, step.set_lineno(node.lineno))

    def render(self, known: dict[str, Any], before: Rendering | None) -> tuple[str, Rendering]:
        """The text, and what a later one may take over.

        Args:
            known: the template's variables.
            before: a rendering with the same, but for the messages.
        """
        run = _Run(self, {} if before is None else before.loops)
        context = self._template.new_context({**known, _BEGIN: run.begin, _STEP: run.step, _AT: run.at})
        out = run.out
        try:
            for piece in self._template.root_render_func(context):
                out.append(piece)
        except Exception:
            self._environment.handle_exception()
        return "".join(out), Rendering(run.loops)


def _call(name: str, *given: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(given), [], None, None)


def _look_up_by_call(node: nodes.Node, names: set[str]) -> None:
    """Elements of these lists are looked up by a function that is told so."""
    for key, value in node.iter_fields():
        for k, one in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(one, nodes.Node):
                continue
            _look_up_by_call(one, names)
            if _is_indexed(one) and one.node.name in names:  # type: ignore[attr-defined]
                made = _call(_AT, one.node, one.arg).set_lineno(one.lineno)  # type: ignore[attr-defined]
                if isinstance(value, list):
                    value[k] = made
                else:
                    setattr(node, key, made)


@dataclass
class _Rounds:
    """What is known of a loop that ran.

    Attributes:
        items: over which it ran. outside: the variables that its body may read, as they were; attributes of namespaces.
        texts: of the rounds. states: of namespaces before each round. reaches: of the items looked at before each
            round, the last one's index.
    """

    items: list[Any]
    outside: list[Any]
    texts: list[str] = field(default_factory=list)
    states: list[list[tuple[Any, ...]]] = field(default_factory=list)
    reaches: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Rendering:
    """Its loops, by their number."""

    loops: dict[int, _Rounds]


class _Run:
    """One rendering under way: `begin`, `step` and `at` are called by the template."""

    def __init__(self, template: ResumableTemplate, before: dict[int, _Rounds]) -> None:
        self.out: list[str] = []
        self.loops: dict[int, _Rounds] = {}
        self._template, self._before = template, before
        self._rounds: _Rounds | None = None
        self._spaces: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        self._skipped = self._written = 0
        self._reach: float = -1
        self._is_first = True

    def begin(self, number: int, items: Any, *values: Any) -> Any:
        """What is left to loop over."""
        self._rounds = None
        self._skipped, self._reach, self._is_first = 0, -1, True
        loop = self._template.loops[number]
        of_names = list(zip(loop.names, values, strict=True))
        spaces = {name: _attributes(one) for name, one in of_names if isinstance(one, Namespace)}
        if type(items) is not list or (loop.whole | loop.indexed) & spaces.keys():
            return items
        self._spaces = [(found, loop.written[name]) for name, found in spaces.items() if name in loop.written]
        outside: list[Any] = []
        for name, one in of_names:
            if name in spaces:
                outside.append(_Space(spaces[name]))
            else:  # what is looked up in the list itself is known by `at`
                outside.append(_ITEMS if one is items and name not in loop.whole else one)
        self._rounds = rounds = _Rounds(items, outside)
        before = self._before.get(number)
        if before is not None and (size := _shared(before, rounds, loop)):
            rounds.texts, rounds.states = before.texts[:size], before.states[:size]
            rounds.reaches, self._reach = before.reaches[:size], before.reaches[size]
            for (attributes, names), state in zip(self._spaces, before.states[size], strict=True):
                for name, value in zip(names, state, strict=True):
                    if value is missing:
                        attributes.pop(name, None)
                    else:
                        attributes[name] = value
            self.out.append("".join(rounds.texts))
            self._skipped = size
        self.loops[number] = rounds
        return items[self._skipped :] if self._skipped else items

    def step(self, loop: LoopContext) -> None:
        """A round begins."""
        rounds = self._rounds
        if self._is_first and self._skipped:
            loop.index0, loop._before = self._skipped, rounds.items[self._skipped - 1]  # type: ignore[union-attr]
        if rounds is None:
            return
        if not self._is_first:
            rounds.texts.append("".join(self.out[self._written :]))
        state = [tuple([one.get(name, missing) for name in names]) for one, names in self._spaces]
        self._written, self._is_first = len(self.out), False
        if any(type(value) not in _PLAIN and value is not missing for one in state for value in one):
            self._rounds = None  # what is known until here stays known
            return
        rounds.states.append(state)
        rounds.reaches.append(self._reach)

    def at(self, value: Any, index: Any) -> Any:
        """`value[index]`, as the template's environment looks it up."""
        if type(value) is list:
            is_told = self._rounds is not None and value is self._rounds.items and type(index) is int and index >= 0
            self._reach = max(self._reach, index) if is_told else math.inf
        return self._template._environment.getitem(value, index)


_ITEMS = object()


class _Space(dict[str, Any]):
    """The attributes of a namespace, as they were."""


def _attributes(one: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(one, "_Namespace__attrs")
    return found


def _shared(before: _Rounds, now: _Rounds, loop: _Loop) -> int:
    """How many rounds of a loop can be taken over."""
    same = identical(before.items, now.items)
    size = min(same - 1, len(before.states) - 1, len(before.texts))  # each may have looked at the next one
    size = min(size, bisect_left(before.reaches, same) - 1)
    for old, new in zip(before.outside, now.outside, strict=True):
        if type(old) is not _Space or type(new) is not _Space:
            size = size if _is_same(old, new) else 0
            continue
        if old.keys() != new.keys():
            return 0
        for name, one in new.items():
            if _is_same(old[name], one):
                continue
            if name not in loop.compared or type(one) is not int or type(old[name]) is not int:
                return 0
            size = min(size, one, old[name])  # rounds before both
    return max(size, 0)


def _is_same(old: Any, new: Any) -> bool:
    """Whether a template cannot tell them apart."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(new, Macro):
        code = new._func.__code__  # what it reads is compared by itself, but for parameters of a macro around it
        own = all(not name.startswith("l_") or name.startswith("l_0_") for name in code.co_freevars)
        return own and old._func.__code__ is code
    return isinstance(new, Undefined) or (type(new) in _PLAIN and bool(old == new))


def identical(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many objects two lists have in common, from the first on."""
    return next(compress(count(), map(operator.is_not, one, other)), min(len(one), len(other)))


class Renderings:
    """The last ones of a session, which later ones of it go on from."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[Any, ...], dict[str, Any], Rendering]] = []

    def tools(self, about: tuple[Any, ...]) -> Any:
        """The tools of a rendering that was `about` the same, None for no such rendering."""
        return next((known["tools"] for of, known, _ in self._kept if of == about), None)

    def text(self, template: ResumableTemplate, known: dict[str, Any], about: tuple[Any, ...]) -> str:
        """What the template makes of `known`, its variables. Raises what templates do.

        Args:
            about: equal where the template and all variables but the messages are.
        """
        messages = known[_MESSAGES]
        best, size = -1, 0
        for k, (of, others, _) in enumerate(self._kept):
            if of == about and (found := identical(others[_MESSAGES], messages)) > size:
                best, size = k, found
        text, made = template.render(known, self._kept[best][2] if size else None)
        if size and size >= len(self._kept[best][1][_MESSAGES]) - 1:  # its last message may have been that call's alone
            del self._kept[best]
        self._kept = [*self._kept[1 - _MOST :], (about, known, made)]
        return text
