"""What the command line says about a user's mistake: the key, what is wrong with it, and what would be accepted.

Promises: one short message instead of a usage page or a traceback; exit code 2. Knows jsonargparse's wording, and
leaves a message it does not recognise as it is.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from packaging.requirements import Requirement

from app.cli.runs.run_directory import RunDirectoryError, disk_trouble
from app.text import printable

_PROJECT = Path(__file__).resolve().parents[2]
_PACKAGES = ("app", "modules", "datamodules", "callbacks", "benchmarks")

_OFFERING = (
    "datamodules.rewards",
    "datamodules.workflows",
    "datamodules.prompts",
    "datamodules.filters",
    "datamodules.inference",
    "datamodules",
    "callbacks",
    "modules",
)
"""Where classes and functions are that a configuration names by their import path."""

# What is meant seldom; said where nothing else is.
_UNLIKELY = ("- Expected a path but ", "- Expected a <class 'list'>")
_FILE = r"[\w/.-]+\.(ya?ml|json|toml)\b|/"
_AROUND = ("Problem with given class_path", "Parser key", "Given value", "Does not validate")

_DOTTED = "- Expected a dot import path string: "

_LONGEST = 500  # characters in a line of a message

_MAKING = "Problem with given class_path"  # jsonargparse, around what a class raised that it was to make

_NO_METRIC = "Early stopping conditioned on metric"  # Lightning's EarlyStopping, whose error is no class of its own
_NOT_YET = (
    "A metric of training steps is not there at the validation before the first one: set strict: false, or"
    " without_callbacks: [ValidateEnds]"
)

# jsonargparse lists every alternative of a type; these lines tell a user nothing about the one that was meant.
_NOISE = (
    "Does not validate against any of the Union subtypes",
    "- Does not validate against any of the Union subtypes",
    "Given value: NestedArg(",
    "Subtypes: ",
    "Errors:",
    "- Expected a <class 'NoneType'>",
    "- Not a valid subclass of",
    "Subclass types expect one of:",
    "- a class path (str)",
    "- a dict with ",
    "- a dict without ",
    "Given value type",
)


# What jsonargparse says without a remedy, and the remedy.
_REMEDIES = (
    (
        r"arguments are required: fit\.(data|model)",
        "Name a configuration: --config FILE.yaml (configs/ has some to copy)",
    ),
    (r"Unexpected import path format: ", "Write module.name, with module.py in this directory"),
    (
        r'Parser key "reward":[\s\S]*but got \[',
        "One reward is taken: several are the parts of datamodules.rewards.WeightedSum",
    ),
    (
        r"lightning\.Lightning(?:DataModule|Module)':\s+unrecognized arguments: --[\w.]+\.help",
        "What it may be depends on the class: put --config FILE.yaml, or --data datamodules.RolloutDataModule and"
        " --model modules.PolicyModule, in front of it",
    ),
    (
        r'Parser key "lr_scheduler":[\s\S]*arguments are required: optimizer',
        "lr_scheduler names a class whose first argument is the optimizer; no function, and none made of others"
        " (SequentialLR): OneCycleLR warms up and falls, or extend LambdaLR",
    ),
)


class OtherCommandFailed(RuntimeError):
    """A run that a verb started did not end well; what it said is on the screen, the message says which it was."""


class ArboristParser(LightningArgumentParser):
    """LightningArgumentParser that takes no abbreviated keys and explains mistakes shortly."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("prog", "arborist")
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def dump(self, *args: Any, **options: Any) -> str:
        """Parsing has checked it, and doing so anew takes longer than all else. `--print_config` asks to."""
        return str(super().dump(*args, **{"skip_validation": True} | options))

    def save(self, *args: Any, **options: Any) -> None:
        super().save(*args, **{"skip_validation": True} | options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        known = [action.dest for action in parser._actions]
        prog = parser.prog.replace(" [options]", "")
        sys.stderr.write(f"error: {printable(explain(message, known))}\nAll options: {prog} --help\n")
        raise SystemExit(2)


class Making:
    """Makes what a configuration names, and knows the error of what could not be made: where an option's type has
    alternatives jsonargparse keeps its text alone, in a list of what none of them can do with the value."""

    def __init__(self) -> None:
        self._failed: Exception | None = None

    def __call__(self, class_type: Any, *args: Any, **kwargs: Any) -> Any:
        """jsonargparse's instantiator: of no other effect."""
        try:
            return class_type(*args, **kwargs)
        except Exception as error:
            self._failed = error
            raise

    def cause(self, error: Exception) -> Exception | None:
        """The error that `error`, which jsonargparse raised, quotes; None where it is another."""
        told = "".join(str(error).split())  # it indents what it quotes
        return self._failed if self._failed is not None and "".join(str(self._failed).split()) in told else None


def explain(message: str, known: Iterable[str]) -> str:
    """`message` of jsonargparse without its noise, and with the options that are accepted where one was not.

    Args:
        known: the keys of the parser that refused, for a suggestion.
    """
    if renamed := _renamed(message):
        return "\n".join(renamed)
    if missing := _missing(message):
        return missing
    lines = [line for line in message.splitlines() if not line.strip().startswith(_NOISE)]
    short = [line for line in lines if not line.strip().startswith(_UNLIKELY) or re.search(_FILE, line)]
    if not all(line.strip().removeprefix("- ").startswith(_AROUND) for line in short if line.strip()):
        lines = short
    lines = [line for line in lines if len(line) < 200 or not line.strip().startswith("Given value:")]
    lines = [_plain(line) for line in lines]
    lines = list({line.strip().removeprefix("- "): cut(line) for line in reversed(lines) if line.strip()}.values())[
        ::-1
    ]
    if any("- Expected a <class" in line for line in lines):  # a value, of which a class is the unlikely kind
        lines = [line for line in lines if _DOTTED not in line]
    files = [name for name in re.findall(r"Expected a path but (\S+)", "\n".join(lines)) if re.search(_FILE, name)]
    if files:  # which is not there, and no module either
        beside = ("No module named", _DOTTED, *(f"class_path '{name}'" for name in files))
        lines = [line for line in lines if not any(part in line for part in beside)]
    hints = [_import_hint(line.partition(_DOTTED)[2].strip()) for line in lines if _DOTTED in line]
    hints += [
        _module_hint(name) for name in re.findall(r"^ *(?:- )?No module named '([\w.]+)'", "\n".join(lines), re.M)
    ]
    hints += [_class_hint(*refused) for refused in _refused("\n".join(lines))]
    remedies = [remedy for pattern, remedy in _REMEDIES if re.search(pattern, message)]
    if remedies:
        return "\n".join([*lines, *remedies])
    unknown = re.search(r"does not accept option '([\w.]+)'|unrecognized arguments: --([\w.]+)", message, re.IGNORECASE)
    if unknown:
        hints.append(_closest(unknown.group(1) or unknown.group(2), known))
    return "\n".join([*lines, *dict.fromkeys(hint for hint in hints if hint)])


def cut(text: str) -> str:
    """`text`, or its beginning and its end, where causes and files stand, of one that is too long to be read."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 2]} ... ({len(text):,} characters) ... {text[-_LONGEST // 2 :]}"


def users_mistake(error: BaseException) -> BaseException | None:
    """The first error in `error`'s chain of causes that is written for a user; it names the key, and quotes those below
    it. Such are errors of a class of this project, of Lightning's configuration checks, a ValueError or
    FileNotFoundError that this project's code raised, the ImportError of a class that the configuration names, whose
    library is not installed, or that of a package which an extra brings; or, when there is none, what a full or
    read-only disk said. None for failures."""
    if isinstance(error, ModuleNotFoundError) and (hint := _extra_hint(error.name or "")):
        return ImportError(f"{error}. {hint}")
    current: BaseException | None = error
    over: BaseException | None = None
    while current is not None:
        if isinstance(current, RuntimeError) and str(current).startswith(_NO_METRIC):
            return ValueError(f"trainer.callbacks: {current}. {_NOT_YET}")
        if _is_for_users(current) or (isinstance(current, ImportError) and str(over).startswith(_MAKING)):
            return current
        current, over = current.__cause__, current
    trouble = disk_trouble(error)
    return None if trouble is None else RunDirectoryError(trouble)


def _is_for_users(error: BaseException) -> bool:
    if isinstance(error, MisconfigurationException) or type(error).__module__.split(".")[0] in _PACKAGES:
        return True
    if not isinstance(error, ValueError | FileNotFoundError):
        return False
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    return is_ours(last.tb_frame.f_code.co_filename)


def is_ours(file: str) -> bool:
    """Whether a source file is this project's."""
    return any(Path(file).resolve().is_relative_to(_PROJECT / package) for package in _PACKAGES)


def _refused(message: str) -> list[tuple[str, str]]:
    """The classes that `message` speaks of, each with the option that it does not accept."""
    pattern = r"class_path '([\w.]+)':\s+(?:Option '([\w.]+)'|unrecognized arguments: --([\w.]+))"
    return [(path, option or flag) for path, option, flag in re.findall(pattern, message)]


def _renamed(message: str) -> list[str]:
    """A line for each option in `message` that has another name now: its class says so, in `renamed_options`."""
    part = re.search(r'Parser key "(\w+)"', message)
    prefix = f"{part.group(1)}." if part else ""
    for class_path, option in _refused(message):
        names = getattr(imported(class_path), "renamed_options", {})
        first, dot, rest = option.partition(".")
        if first in names:
            pairs = {name: names[name] for name in names if f"'{name}':" in message}  # all of the same file
            if first not in pairs:  # a flag
                pairs = {option: f"{names[first]}{dot}{rest}"}
            return [f"{prefix}{old}: is now {prefix}{new}" for old, new in pairs.items()]
    return []


_NOT_IN_MODULE = re.compile(r"Problem with given class_path '([\w.]+)\.(\w+)':\s+module '\1' has no attribute '\2'")


def _missing(message: str) -> str:
    """Of a name that its module, which is there, does not have: the key, and what may have been meant; "" of others."""
    found = _NOT_IN_MODULE.search(message)
    if found is None:
        return ""
    module, name = found.groups()
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message[: found.start()]))
    there = vars(sys.modules[module]) if module in sys.modules else {}
    own = [
        other
        for other, value in there.items()
        if not other.startswith("_") and callable(value) and getattr(value, "__module__", module).startswith(module)
    ]
    close = difflib.get_close_matches(name, own, n=1)
    hint = f"did you mean '{module}.{close[0]}'?" if close else f"it has {', '.join(sorted(own)) or 'nothing to call'}"
    return cut(f"{key}: module '{module}' has no attribute '{name}'; {hint}")


def imported(class_path: str) -> Any:
    """The class or function of that name; None where there is none."""
    module, _, name = class_path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _plain(line: str) -> str:
    """A line without what jsonargparse says of types."""
    line = re.sub(r"Type [\w.]+\[.*\] expects a function or a callable class: ", "", line)
    return line.partition(". Got value: Namespace(")[0].rstrip()


def _import_hint(name: str) -> str:
    """Of a name without its module: where such a name is to be had."""
    offered: dict[str, str] = {}
    for package in _OFFERING:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        offered |= {one: f"{package}.{one}" for one in getattr(module, "__all__", ()) if one not in offered}
    if close := difflib.get_close_matches(name, offered, n=1):
        return f"Did you mean '{offered[close[0]]}'?"
    return (
        f"'{name}' is no import path: name the module too, as in my_module.{name} with my_module.py in this directory"
    )


def _module_hint(name: str) -> str:
    first, *below = name.split(".")
    if below and find_spec(first) is not None:  # then `first` was imported on the way, and all above what is missing
        above, _, last = name.rpartition(".")
        there = getattr(sys.modules.get(above), "__path__", ())
        close = difflib.get_close_matches(last, [one.name for one in iter_modules(there)], n=1)
        meant = f"did you mean '{above}.{close[0]}'?" if close else f"correct the import, or update {first}"
        return f"There is a package {first}, and no {name} in it: {meant}"
    return _extra_hint(name) or f"There is no {first} to import: run where {first}.py is, or install its package"


def _extra_hint(name: str) -> str:
    """Of a package that extras of this project bring: how to install one; "" of others, and of modules below one."""
    try:
        wanted = [Requirement(text) for text in metadata.requires("arborist") or ()]
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        wanted = []
    markers = [str(one.marker) for one in wanted if one.name.replace("-", "_") == name]
    extras = [one for marker in markers for one in re.findall(r'extra == "([\w-]+)"', marker) if one != "dev"]
    install = " or ".join(f"pip install -e '.[{one}]'" for one in extras)
    return f"The package {name} comes with an extra of this project: {install}" if extras else ""


def _class_hint(class_path: str, option: str) -> str:
    """What the class, or the record of options that `option` leads into, accepts."""
    owner = class_path.rpartition(".")[2]
    try:
        options = options_of(imported(class_path))
    except (NameError, TypeError, ValueError):
        return ""
    accepted, (first, _, rest) = list(options), option.partition(".")
    elsewhere = getattr(imported(class_path), "called_elsewhere", {}).get(option)
    if rest and first in options and is_dataclass(record := options[first].default):
        owner, option, accepted = first, rest, [field.name for field in fields(record)]
    meant = f"Did you mean '{elsewhere}'?" if elsewhere else _closest(option, accepted)
    return f"{meant} {owner} accepts: {', '.join(accepted) or 'no options'}".strip()


def options_of(made: Any) -> dict[str, inspect.Parameter]:
    """What a class or function can be called with, by name; of a constructor that hands `**options` on to the class it
    extends, the options of that class, too.

    Raises:
        TypeError, ValueError, NameError: it has no signature, or one whose types are not known.
    """
    found: dict[str, inspect.Parameter] = {}
    classes = inspect.getmro(made) if inspect.isclass(made) else ()
    for function in [vars(one)["__init__"] for one in classes if "__init__" in vars(one)] or [made]:
        parameters = list(inspect.signature(function, eval_str=True).parameters.values())
        handed_on = [one for one in parameters if one.kind is one.VAR_KEYWORD]
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        found = {one.name: one for one in named if one.name != "self"} | found
        if not handed_on:
            break
    return found


def _closest(key: str, known: Iterable[str]) -> str:
    keys = list(known)
    first = key.split(".")[0]  # `modle.class_path` is a mistake in its first part
    close = difflib.get_close_matches(key, keys, n=1) or difflib.get_close_matches(first, keys, n=1)
    return f"Did you mean '{close[0]}'?" if close else ""
