"""What a configuration must satisfy before anything of it is built: as YAML, and once it is parsed.

Promises: a file or value that repeats a key, that is nested or large beyond reason, or whose aliases multiply into more
than it shows, is refused with the place; so is a checkpoint to go on with that does not look like one, a run directory
without a name, a number that is not finite or beyond 64 bits, a null where none can be: each in one line that names the
key and the remedy. Objects are never made from tags (the loader is PyYAML's safe one); what a configuration names by
`class_path` is imported and run, though: a configuration is a program.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
import typing
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from jsonargparse import get_loader
from lightning.pytorch.accelerators import Accelerator, CUDAAccelerator, XLAAccelerator

from app.cli.errors import options_of
from app.cli.runs.last_checkpoint import LAST, last_checkpoints
from app.strategies.checkpoint.checkpoints import MANIFEST_FILE

_KNOWN = ("app", "modules", "datamodules", "callbacks", "torch")
_LARGEST_SEED = 2**32 - 1  # numpy's
_LARGEST_WHOLE = 2**63 - 1
_LARGEST_FILE = 10_000_000  # bytes
_HALF = ("16", "16-mixed", "16-true", "transformer-engine-float16")  # Lightning makes bf16-mixed of one on CPUs
_ACCELERATORS: dict[str, tuple[type[Accelerator], ...]] = {
    "gpu": (CUDAAccelerator,),
    "cuda": (CUDAAccelerator,),
    "tpu": (XLAAccelerator,),
}
_WRAPPERS = ("ddp", "fsdp", "deepspeed", "xla")

_HIGHER_IS_BETTER = re.compile(r"(.*/)?(accuracy|reward|(mean|pass|best)@.*)")  # names of metrics

_MOST_NODES = 200_000  # values and keys, every use of an alias counted as what it stands for
_MOST_DEPTH = 100

_NULLS = ("", "~", "null", "Null", "NULL")
_load = get_loader("yaml")
_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigurationError(yaml.YAMLError):
    """YAML that is not taken; the message names the place and the remedy."""


class _Dumper(yaml.SafeDumper):
    """Quotes words such as "1e3", which YAML 1.1 takes for a word and jsonargparse's loader for a number."""


_EXPONENT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, None)
# Texts of a kind of their own, such as an enumeration's, which Lightning's Timer has as a default.
_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))


def install_reader() -> None:
    """From here on jsonargparse reads YAML through this file, and writes what reads as the same."""
    jsonargparse.set_loader("yaml", read_yaml, exceptions=(yaml.YAMLError,))
    jsonargparse.set_dumper("yaml", _write_yaml)


def _write_yaml(value: Any) -> str:
    return str(yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


def read_yaml(text: str) -> Any:
    """The value of `text`, a file's or a single option's: one that holds comments alone is itself.

    Raises:
        yaml.YAMLError: it is no YAML. ConfigurationError: see above.
    """
    if text == "None":  # what jsonargparse makes of a flag's null on its way into a nested option
        return None
    if any(sign in text for sign in "\n{[&"):  # a plain word or number has neither keys nor aliases
        _check_yaml(text)
    value = _load(text)
    # jsonargparse hands strings of a file that was read over once more, where an option takes null besides: there
    # "#### (.+)" is no comment, but what the user said.
    return text if value is None and text.strip() not in _NULLS else value


@dataclass
class _Open:
    """A collection that is being read: whose keys, and how many nodes so far."""

    anchor: str | None
    is_mapping: bool
    keys: set[str] = field(default_factory=set)
    children: int = 0
    nodes: int = 1


def _check_yaml(text: str) -> None:
    sizes: dict[str, int] = {}
    opened: list[_Open] = []
    for event in yaml.parse(text, Loader=_Parser):
        nodes = 0
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            opened.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            if len(opened) > _MOST_DEPTH:
                raise ConfigurationError(
                    f"nested more than {_MOST_DEPTH} deep, {_place(event)}; a configuration is flat"
                )
            continue
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = opened.pop()
            nodes = done.nodes
            if done.anchor is not None:
                sizes[done.anchor] = nodes
        elif isinstance(event, yaml.AliasEvent):
            nodes = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
            if opened and opened[-1].is_mapping and opened[-1].children % 2 == 0:
                _note_key(opened[-1], event)
        if opened and nodes:
            opened[-1].children += 1
            opened[-1].nodes += nodes
            if opened[-1].nodes > _MOST_NODES:
                raise ConfigurationError(
                    f"more than {_MOST_NODES:,} values with aliases (*name) written out, {_place(event)}; write less"
                )


def _note_key(mapping: _Open, event: yaml.ScalarEvent) -> None:
    if event.value in mapping.keys and event.value != "<<":
        raise ConfigurationError(f"the key '{event.value}' is there twice, again {_place(event)}; remove one of them")
    mapping.keys.add(event.value)


def _place(event: yaml.Event) -> str:
    return f"in line {event.start_mark.line + 1}"


def check_config_files(args: Iterable[str]) -> None:
    """The files that a command line names with `--config`, as far as a parser would not say what is wrong."""
    words = list(args)
    following = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--config", "-c")]
    for name in [*following, *(word.partition("=")[2] for word in words if word.startswith("--config="))]:
        if "\0" in name or not Path(name).is_file():
            continue  # the parser's to refuse
        content = Path(name).read_bytes()
        if len(content) > _LARGEST_FILE:
            raise ValueError(f"config: {name} has {len(content):,} bytes, which is no configuration")
        try:
            options = read_yaml(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"config: {name} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
        except yaml.MarkedYAMLError as error:
            mark, problem = error.problem_mark, error.problem or error.context
            where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
            raise ConfigurationError(f"config: {name}{where}: {problem}") from None
        except yaml.YAMLError as error:
            raise ConfigurationError(f"config: {name}: {error}") from None
        if not isinstance(options, dict):
            raise ConfigurationError(f"config: {name} holds no options by their names; correct it, or leave it out")


def check_run_dir(asked: str | None) -> None:
    """`--run_dir`, as it was given."""
    if asked is not None and not asked.strip():
        raise ValueError("run_dir: the name is empty; name a directory, or leave run_dir out for a fresh one")


def check_checkpoint(ckpt_path: str | None, run_dir: str | None, others: Iterable[Path], subcommand: str) -> None:
    """`--ckpt_path`, as it was given.

    Args:
        run_dir: `--run_dir`. others: directories that configured callbacks write checkpoints to.
    """
    if ckpt_path is None or "://" in ckpt_path:
        return
    if ckpt_path == LAST:
        _check_last(run_dir, others, subcommand)
    elif ckpt_path in ("best", "hpc"):
        raise ValueError(
            f"ckpt_path: {ckpt_path} means nothing to a new process; name the checkpoint, or 'last' with --run_dir"
        )
    else:
        _check_path(ckpt_path)


def restarted_by_agent() -> bool:
    """Whether torchrun started this process: first starts and restarts then have the same command."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _check_last(run_dir: str | None, others: Iterable[Path], subcommand: str) -> None:
    directories = [*([Path(run_dir) / "checkpoints"] if run_dir is not None else []), *others]
    if last_checkpoints(directories):
        return
    if not directories:
        raise ValueError(
            "ckpt_path: last needs the run it goes on with; name it with --run_dir, or name the checkpoint itself"
        )
    if restarted_by_agent() and subcommand == "fit":
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"ckpt_path: last: no checkpoint in {directories[0]} yet; starting from the beginning\n")
        return
    raise ValueError(
        f"ckpt_path: last: there is no checkpoint in {' or '.join(map(str, directories))}; is run_dir mistyped? Leave"
        " ckpt_path out to start from the beginning"
    )


def _check_path(ckpt_path: str) -> None:
    path = Path(ckpt_path)
    if not ckpt_path.strip() or "\0" in ckpt_path or not path.exists():
        raise ValueError(
            f"ckpt_path: {ckpt_path!r} does not exist; name a checkpoint, such as RUN_DIR/checkpoints/last.ckpt, or say"
            " 'last' with --run_dir"
        )
    if path.is_dir() and not (path / MANIFEST_FILE).is_file():
        raise ValueError(
            f"ckpt_path: {path} is a directory without {MANIFEST_FILE}, so it is no checkpoint; name one, such as"
            " RUN_DIR/checkpoints/last.ckpt"
        )
    if path.is_file() and not zipfile.is_zipfile(path):
        raise ValueError(f"ckpt_path: {path} is no checkpoint; name one, such as RUN_DIR/checkpoints/last.ckpt")


def check_values(config: Any) -> None:
    """The whole configuration, as nested mappings: numbers that no option takes, and nulls for what cannot be null."""
    _check_numbers("", config)
    _check_nulls("", config)


def check_parts(config: Mapping[str, Any]) -> None:
    """`model` and `data`, which have to name a class, and `trainer`, which has to be there."""
    for key, example in (("model", "modules.PolicyModule"), ("data", "datamodules.RolloutDataModule")):
        part = config.get(key)
        if isinstance(part, Mapping) and str(part.get("class_path")).startswith(("None", "lightning.")):
            raise ValueError(f"{key}: it names no class; set {key}.class_path, for example to {example}")
    if not isinstance(config.get("trainer"), Mapping):
        raise ValueError(f"trainer: {config.get('trainer')!r} is no set of options; leave trainer out for the defaults")


def check_trainer(seed: Any, trainer: Mapping[str, Any]) -> None:
    """`seed_everything`, and options of the trainer that would mean something else than they say."""
    if isinstance(seed, int) and not isinstance(seed, bool) and not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed_everything: {seed}, must be between 0 and {_LARGEST_SEED}")
    if str(trainer.get("precision")) in _HALF:
        raise ValueError(
            f"trainer.precision: {trainer.get('precision')} is not supported (float16 would need loss scaling inside"
            " the tree pass): use 32-true, bf16-mixed or bf16-true"
        )
    accelerator = trainer.get("accelerator")
    if accelerator == "mps":
        raise ValueError(
            "trainer.accelerator: mps is not supported (the tree's kernels, and how ranks meet, are for CPUs and CUDA"
            " GPUs): set it to cpu, or leave it out"
        )
    if (kinds := _ACCELERATORS.get(str(accelerator))) and not any(kind.is_available() for kind in kinds):
        raise ValueError(
            f"trainer.accelerator: {accelerator}, and torch finds none on this machine; set it to cpu or auto, or mend"
            " what 'arborist doctor' says of GPU and driver"
        )
    interval, clip = trainer.get("val_check_interval"), trainer.get("gradient_clip_val")
    if isinstance(interval, int | float) and interval <= 0:
        raise ValueError(
            f"trainer.val_check_interval: {interval}, must be above 0 (batches, or a share of an epoch); set"
            " trainer.limit_val_batches to 0 to leave validation out"
        )
    if isinstance(clip, int | float) and clip < 0:
        raise ValueError(f"trainer.gradient_clip_val: {clip}, must be at least 0; leave it out for no clipping")
    if trainer.get("check_val_every_n_epoch") == 0:
        raise ValueError("trainer.check_val_every_n_epoch: 0, must be at least 1, or null to validate by steps alone")
    if trainer.get("overfit_batches"):
        raise ValueError(
            f"trainer.overfit_batches: {trainer['overfit_batches']} would end epochs early, but the next one goes on"
            " with other batches, so nothing is overfitted: leave it out, and give the data no more prompts than a"
            " batch has"
        )
    for kind in ("steps", "epochs"):
        least, most = trainer.get(f"min_{kind}"), trainer.get(f"max_{kind}")
        if isinstance(least, int) and isinstance(most, int) and 0 <= most < least:
            raise ValueError(
                f"trainer.min_{kind}: {least} is more than trainer.max_{kind}: {most}, at which the run ends; raise the"
                " latter, or leave the former out"
            )
    if trainer.get("barebones"):
        raise ValueError("trainer.barebones: every run logs and saves, which it forbids; leave it out")
    _check_monitors(trainer.get("callbacks") or (), validates=trainer.get("limit_val_batches") != 0)
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and strategy.startswith(_WRAPPERS):
        raise ValueError(
            f"trainer.strategy: {strategy} wraps the model and averages gradients, where tree training sums them: leave"
            " strategy out, or name app.strategies.DTAStrategy"
        )


def _check_monitors(callbacks: Any, validates: bool) -> None:
    """Lightning's callbacks follow a metric downwards unless told otherwise: the worst model would be kept as the best,
    and a run that learns would be stopped. Of one that is never measured nothing would be kept, without a word."""
    for callback in callbacks if isinstance(callbacks, list | tuple) else (callbacks,):
        options = (callback.get("init_args") if isinstance(callback, Mapping) else None) or {}
        monitor = str(options.get("monitor"))
        if _HIGHER_IS_BETTER.fullmatch(monitor) and options.get("mode") == "min":
            name = str(callback["class_path"]).rpartition(".")[2]
            raise ValueError(f"trainer.callbacks: {name} looks for the smallest {monitor} (mode: min); set mode: max")
        if monitor.startswith("val/") and not validates:
            name = str(callback["class_path"]).rpartition(".")[2]
            raise ValueError(
                f"trainer.callbacks: {name} follows {monitor}, which trainer.limit_val_batches: 0 leaves unmeasured;"
                " leave that out, or the callback's monitor"
            )
        timing = [key for key in ("every_n_train_steps", "train_time_interval") if options.get(key)]
        if monitor.startswith("val/") and timing:
            raise ValueError(
                f"trainer.callbacks: {timing[0]} saves between validations too, where {monitor} is still that of"
                " earlier weights: leave it out, to save after each validation, or leave monitor out"
            )


def _check_numbers(key: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check_numbers(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key}: {value} is not finite; every number of a configuration must be")
    elif isinstance(value, int) and not -_LARGEST_WHOLE <= value <= _LARGEST_WHOLE:
        raise ValueError(f"{key}: {value} is beyond 64 bits; no option is that large")
    elif isinstance(value, str) and "\0" in value:
        raise ValueError(f"{key}: {value!r} has a NUL in it; remove it")


def _check_nulls(key: str, value: Any) -> None:
    """jsonargparse takes null for any option, and anything for a record of options; the constructor fails on it."""
    if isinstance(value, list | tuple):
        for inner in value:
            _check_nulls(key, inner)
    if not isinstance(value, Mapping):
        return
    given = value.get("init_args")
    if isinstance(value.get("class_path"), str) and isinstance(given, Mapping):
        _check_options(f"{key}.init_args", given, _known_options(value["class_path"]))
    for name, inner in value.items():
        _check_nulls(f"{key}.{name}" if key else str(name), inner)


def _check_options(key: str, given: Mapping[str, Any], options: Mapping[str, inspect.Parameter]) -> None:
    for name, option in options.items():
        if name not in given:
            continue
        if given[name] is None and option.default is not None and not _takes_none(option.annotation):
            raise ValueError(f"{key}.{name}: null is no value for it; {_instead_of_null(name, option.default)}")
        if is_dataclass(option.default):
            fields = options_of(type(option.default))
            if not isinstance(given[name], Mapping):
                raise ValueError(f"{key}.{name}: {given[name]!r} is no set of options; it has {', '.join(fields)}")
            _check_options(f"{key}.{name}", given[name], fields)


def _instead_of_null(name: str, default: Any) -> str:
    """A file that is laid over others cannot leave out what they set."""
    if is_dataclass(default):
        unset = [field for field, one in options_of(type(default)).items() if one.default is None]
        fields = f"{name}: {{{unset[0]}: null}}" if unset else "the fields that are meant"
        return f"leave it out for its defaults, or, over a file that sets it, write {fields}"
    if isinstance(default, bool | int | float | str):
        return f"leave it out for its default, or, over a file that sets it, write {yaml.safe_dump(default).split()[0]}"
    return "leave it out for its default"


def _known_options(class_path: str) -> dict[str, inspect.Parameter]:
    """What a class of this project or of torch takes; nothing of others."""
    module, _, name = class_path.rpartition(".")
    if module.split(".")[0] not in _KNOWN:
        return {}
    try:
        return options_of(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, TypeError, ValueError, NameError):
        return {}


def _takes_none(hint: Any) -> bool:
    return hint in (inspect.Parameter.empty, Any, None, type(None), object) or type(None) in typing.get_args(hint)
