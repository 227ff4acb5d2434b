"""The pages of the site that nobody writes: options, recipes, and what lies outside docs/ but is linked from it.

Promises: a page for every class that a configuration can name, and a section for every function that an algorithm is
made of, read off their source (no import: the site builds without torch), so that they cannot be out of date; a page
for every run in configs/; every link of a page that leads to a file of
the checkout leads to a page or a file of the site, else building fails (`mkdocs build --strict`).
"""

from __future__ import annotations

import ast
import html
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"model": "modules", "data": "datamodules", "callbacks": "callbacks", "strategy": "app/strategies"}
ROOTS = {"LightningModule", "LightningDataModule", "Callback", "Strategy", "DDPStrategy", "ParallelStrategy"}
TITLES = {"model": "Options of the model", "data": "Options of the data", "callbacks": "Options of callbacks",
          "strategy": "Options of the strategy"}  # fmt: skip
ALGORITHMS = "algorithms.md"  # of docs/; behind it come the functions
FUNCTIONS = {  # by the option that names them
    "advantage": ("Advantages", "modules/advantages"),
    "objective": ("Objectives", "modules/objectives"),
    "regularisers": ("Regularisers", "modules/regularisers"),
    "correction": ("Corrections", "modules/corrections"),
}
BEHIND = {  # what their docstrings refer to, file and name
    "advantage": ["modules/advantages/estimate.py:Estimate"],
    "objective": ["modules/algorithm.py:LossInputs", "modules/objectives/value_loss.py:value_loss"],
    "regularisers": [
        *(f"modules/regularisers/kl.py:{name}" for name in ("k1", "k2", "k3")),
        "modules/algorithm.py:Regulariser",
    ],
    "correction": ["modules/corrections/levels.py:importance_ratio"],
}
AGGREGATION = "modules/objectives/aggregation.py:token_weights"
_LINK = re.compile(r"(\]\()([^)\s#:]*)(#[^)\s]*)?(\))")
log = logging.getLogger("mkdocs.hooks.pages")
_origin: dict[str, str] = {}  # page or file of the site -> where it is in the checkout
_place: dict[str, str] = {}  # the other way round


@dataclass
class Parameter:
    name: str
    kind: str
    default: str


@dataclass
class Option:
    """A class of the product, as its source has it."""

    path: str
    node: ast.ClassDef
    bases: list[str]
    own: list[Parameter] | None = None
    passes_on: bool = False  # `**more` goes to what it inherits from
    parameters: list[Parameter] = field(default_factory=list)

    @property
    def class_path(self) -> str:
        return f"{self.path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{self.node.name}"


# ---- options


def options() -> dict[str, list[Option]]:
    """For each of `ROOMS` the classes that a configuration can name: models, data, callbacks and strategies, what their
    parameters take, and every class that stands for one of these."""
    every: dict[str, Option] = {}
    for room in ROOMS.values():
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                    every[node.name] = Option(
                        path.relative_to(ROOT).as_posix(), node, bases, _parameters(node), _passes_on(node)
                    )
    for one in every.values():
        for base in (base for base in _line(one, every) if base.own is not None):
            taken = {given.name for given in one.parameters}
            one.parameters += [given for given in base.own or [] if given.name not in taken]
            if not base.passes_on:
                break
    wanted = {name for name, one in every.items() if any(ROOTS & set(base.bases) for base in _line(one, every))}
    while True:
        words = {word for name in wanted for given in every[name].parameters for word in re.findall(r"\w+", given.kind)}
        named = wanted | (words & every.keys())
        shapes = [
            _members(one, every) - {"__subclasshook__"} for one in map(every.__getitem__, named) if _is_shape(one)
        ]
        more = named | {
            name
            for name, one in every.items()
            if {base.node.name for base in _line(one, every)} & named
            or any(len(shape) > 1 and shape <= _members(one, every) for shape in shapes)
        }
        if more == wanted:
            break
        wanted = more
    found: dict[str, list[Option]] = {name: [] for name in ROOMS}
    shown = [name for name in wanted if not name.startswith("_") and ast.get_docstring(every[name].node)]
    for one in (every[name] for name in shown):
        found[next(name for name, room in ROOMS.items() if one.path.startswith(f"{room}/"))].append(one)
    return {name: sorted(ones, key=lambda one: (one.path, one.node.name)) for name, ones in found.items()}


def _line(one: Option, every: dict[str, Option]) -> Iterator[Option]:
    """A class and what it inherits from, nearest first."""
    yield one
    for base in one.bases:
        if base in every and every[base] is not one:
            yield from _line(every[base], every)


def _is_shape(one: Option) -> bool:
    """Whether classes stand for it by what they have, without inheriting."""
    own = {part.name for part in one.node.body if isinstance(part, ast.FunctionDef)}
    return "Protocol" in one.bases or "__subclasshook__" in own


def _members(one: Option, every: dict[str, Option]) -> set[str]:
    """Methods and properties, and what is set on `self`."""
    found = set()
    for node in (node for base in _line(one, every) for node in ast.walk(base.node)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _parameters(node: ast.ClassDef) -> list[Parameter] | None:
    """Of the constructor; None where it has none of its own."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            plain = [*given.posonlyargs, *given.args][1:]
            defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
            pairs = [*zip(plain, defaults[-len(plain) :] if plain else [], strict=True),
                     *zip(given.kwonlyargs, given.kw_defaults, strict=True)]  # fmt: skip
            return [_parameter(arg.arg, arg.annotation, default) for arg, default in pairs]
    if any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        return [_parameter(ast.unparse(one.target), one.annotation, one.value) for one in fields]
    return None


def _passes_on(node: ast.ClassDef) -> bool:
    return any(isinstance(one, ast.FunctionDef) and one.name == "__init__" and one.args.kwarg for one in node.body)


def _parameter(name: str, kind: ast.expr | None, default: ast.expr | None) -> Parameter:
    return Parameter(name, "" if kind is None else ast.unparse(kind), "" if default is None else ast.unparse(default))


def options_page(title: str, found: list[Option]) -> str:
    about = "Made from the classes: what each constructor takes, its type and its default (none: it has to be given)."
    parts = [f"# {title}", "", about, ""]
    if title == TITLES["model"]:
        named = ", ".join(f"`{key}`" for key in FUNCTIONS)
        parts += [f"What {named} and `aggregation` name, with formulas and options: [algorithms](../{ALGORITHMS}).", ""]
    for one in found:
        parts += [f"## {one.node.name}", "", f"`class_path: {one.class_path}`", ""]
        if one.parameters:
            parts += ["| option | type | default |", "|---|---|---|"]
            parts += [f"| `{x.name}` | {_cell(x.kind)} | {_cell(x.default)} |" for x in one.parameters]
            parts.append("")
        parts += [_told(ast.get_docstring(one.node) or ""), ""]
    return "\n".join(parts)


def _told(text: str) -> str:
    return f'<pre class="told">{html.escape(text, quote=False)}</pre>'.replace("\n\n", "\n&#8203;\n")


def _cell(code: str) -> str:
    code = re.sub(r"\s+", " ", code).replace("|", "&#124;")
    return f"<code>{code.replace('<', '&lt;')}</code>" if code else ""


# ---- functions that an algorithm is made of


def functions(key: str) -> dict[str, tuple[str, ast.FunctionDef]]:
    """What the option `key` (of `FUNCTIONS`) can be called, in the order of its table: file and definition by name."""
    face = f"{FUNCTIONS[key][1]}/__init__.py"
    body = ast.parse((ROOT / face).read_text()).body
    homes = {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    tables = [node.value for node in body if isinstance(node, ast.Assign) and "f.__name__: f" in ast.unparse(node)]
    names = [node.id for node in ast.walk(tables[0]) if isinstance(node, ast.Name) and node.id in homes]
    return {name: (homes[name], _defined(homes[name], name)) for name in names}


def functions_page() -> str:
    """Markdown: of every function its file, signature, default aggregation and docstring, room by room, then how losses
    are weighted."""
    parts: list[str] = []
    for key, (title, room) in FUNCTIONS.items():
        found = functions(key)
        parts += [f"## {title}", "", _told(_head(f"{room}/__init__.py")), ""]
        if key == "objective":
            parts += ["| objective | aggregation, unless you name one |", "|---|---|"]
            parts += [f"| `{name}` | `{default_aggregation(node)}` |" for name, (_, node) in found.items()] + [""]
        for name, (path, node) in found.items():
            parts += _section(name, path, node, f"`{key}: {name}`" if key != "regularisers" else f"`name: {name}`")
        for place in BEHIND[key]:
            path, name = place.split(":")
            parts += _section(name, path, _defined(path, name), "")
    path, name = AGGREGATION.split(":")
    parts += ["## Aggregations", "", *_section(name, path, _defined(path, name), "")]
    return "\n".join(parts)


def default_aggregation(node: ast.FunctionDef) -> str:
    """Of an objective: what its `traits` say, or what they say by default."""
    said = [node for node in _defined("modules/objectives/traits.py", "Traits").body if isinstance(node, ast.AnnAssign)]
    default = next(one.value for one in said if ast.unparse(one.target) == "aggregation")
    decorated = [one for one in node.decorator_list if isinstance(one, ast.Call) and ast.unparse(one.func) == "traits"]
    given = [word.value for one in decorated for word in one.keywords if word.arg == "aggregation"]
    return str(ast.literal_eval((given or [default])[0]))


def _section(name: str, path: str, node: Any, named: str) -> list[str]:
    parts = [f"### {name}", "", ", ".join(filter(None, [named, f"in {path}"])), ""]
    if isinstance(node, ast.FunctionDef):
        parts += ["```python", signature(path, node), "```", ""]
        told = [_head(path)] if named else []
    else:
        told = []
    return [*parts, _told("\n\n".join([*told, ast.get_docstring(node) or ""])), ""]


def signature(path: str, node: ast.FunctionDef) -> str:
    """What it is called with by name, its options (whatever is no input) with type and default."""
    meant = {  # names of literal types and of constants, which say nothing by themselves
        ast.unparse(one.targets[0]): ast.unparse(one.value)
        for file in sorted((ROOT / path).parent.glob("*.py"))
        for one in ast.parse(file.read_text()).body
        if isinstance(one, ast.Assign)
        and (isinstance(one.value, ast.Constant) or ast.unparse(one.value).startswith("Literal["))
    }
    inputs, args = input_names(), node.args.args
    defaults = [None] * (len(args) - len(node.args.defaults)) + list(node.args.defaults)
    told = []
    for arg, default in zip(args, defaults, strict=True):
        kind = "" if arg.annotation is None else ast.unparse(arg.annotation)
        if arg.arg in inputs or kind == "Tensor":
            told.append(arg.arg)
        else:
            written = kind if default is None else f"{kind} = {ast.unparse(default)}"
            told.append(f"{arg.arg}: " + re.sub(r"[A-Z_]\w*", lambda word: meant.get(word[0], word[0]), written))
    line = f"{node.name}({', '.join(told)})"
    return line if len(line) < 100 else "\n".join([f"{node.name}(", *(f"    {one}," for one in told), ")"])


def input_names() -> set[str]:
    """What functions are called with, as `modules/algorithm.py` says it: parameters of these names are no options."""
    path = "modules/algorithm.py"
    names = {ast.unparse(one.target) for one in _defined(path, "LossInputs").body if isinstance(one, ast.AnnAssign)}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("SEQUENCE_INPUTS", "ADVANTAGE_INPUTS"):
            names |= set(ast.literal_eval(node.value))
    return names


def _defined(path: str, name: str) -> Any:
    return next(one for one in ast.parse((ROOT / path).read_text()).body if getattr(one, "name", "") == name)


def _head(path: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""


# ---- recipes


def recipes() -> dict[str, str]:
    """Pages by their place: one for each run in configs/ and examples/, and what lists them."""
    pages, rows = {}, []
    files = [path for room in ("configs", "examples") for path in sorted((ROOT / room).rglob("*.yaml"))]
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        place = f"recipes/{name.removesuffix('.yaml').replace('/', '_')}.md"
        text = path.read_text()
        comment = re.match(r"(?:#.*\n)+", text)
        about = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE).strip() if comment else ""
        pages[place] = (
            f"# {name}\n\n```text\n{about or name}\n```\n\n```yaml\n{text[comment.end() if comment else 0 :]}```\n"
        )
        first = re.split(r"(?<=[.:])\s", " ".join(about.split()))[0]
        rows.append(f"| [{name}]({posixpath.basename(place)}) | {html.escape(first).replace('|', '&#124;')} |")
    pages["recipes/index.md"] = "\n".join(["# Recipes", "", "Complete runs, and files to lay over them.", "",
                                           "| file | what it is |", "|---|---|", *rows, ""])  # fmt: skip
    return pages


# ---- mkdocs calls these


def on_files(files: Files, config: Any) -> Files:
    _origin.clear()
    _place.clear()
    for file in files:
        _origin[file.src_uri] = f"docs/{file.src_uri}"
    _place.update({origin: place for place, origin in _origin.items()})
    for place, text in {
        **{f"options/{name}.md": options_page(TITLES[name], found) for name, found in options().items()},
        **recipes(),
    }.items():
        files.append(File.generated(config, place, content=text))
    add = _adder(files, config)
    add("README.md", "index.md")
    for name in ("app/tree/README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        add(name, f"repo/{name}")
    seen: set[str] = set()
    while more := [place for place in _origin if place.endswith(".md") and place not in seen]:
        for place in more:
            seen.add(place)
            for target in _targets(_origin[place]):
                if target not in _place and (ROOT / target).exists():
                    add(target, _own_place(target))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    here = page.file.src_uri
    if here not in _origin:
        return markdown

    def led(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups()
        if not target:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(_origin[here]), target))
        if there not in _place:
            log.warning("%s: its link to %s leads to nothing", _origin[here], target)
            return found[0]
        return before + posixpath.relpath(_place[there], posixpath.dirname(here) or ".") + (anchor or "") + after

    more = f"\n\n{functions_page()}" if here == ALGORITHMS else ""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)  # code keeps what it says
    return "".join(part if part.startswith("```") else _LINK.sub(led, part) for part in parts) + more


def _adder(files: Files, config: Any) -> Callable[[str, str], None]:
    def add(name: str, place: str) -> None:
        path = ROOT / name
        _place[name], _origin[place] = place, name
        if path.is_dir():
            inside = "\n".join(f"- `{one.name}`" for one in sorted(path.iterdir()) if one.name[0] not in "_.")
            files.append(File.generated(config, place, content=f"# {name}\n\n{inside}\n"))
        elif path.suffix in (".md", ".png"):
            files.append(File.generated(config, place, abs_src_path=str(path)))
        else:
            files.append(
                File.generated(config, place, content=f"# {name}\n\n````{path.suffix[1:]}\n{path.read_text()}\n````\n")
            )

    return add


def _targets(origin: str) -> Iterator[str]:
    path = ROOT / origin
    if path.suffix == ".md" and path.exists():
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for found in _LINK.finditer(text):
            if found[2]:
                yield posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2]))


def _own_place(name: str) -> str:
    path = ROOT / name
    if path.is_dir():
        return f"repo/{name}/index.md"
    return f"repo/{name}" if path.suffix in (".md", ".png") else f"repo/{name}.md"
