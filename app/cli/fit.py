"""The command line: `python -m app fit|validate|test|predict --config X.yaml [--key value ...]`, and the verbs below.

Promises: everything is configured by YAML and flags, where a flag beats the YAML in front of it and both beat what a
checkpoint remembers (but for a learning rate's schedule, of which it is told); every launch gets a run directory of its
own (`runs/<config name>/<time>`, which is said at once, or `--run_dir`), told in the last line of a `fit`, but `fit
--run_dir X --ckpt_path last` goes on with the run in X (its earlier metrics stay, as `metrics_1.csv` and so on); every
run gets the callbacks of `default_callbacks.py`, so that every `fit` saves `last.ckpt` by time, one that ends early
says why, and Ctrl-C or SIGTERM lets it finish the step, save and print the command
that goes on (where nothing is saved, the one that starts again), or after the last step the one that scores the model
(exit codes 130 and 143); a run that its rollouts end saves and says the same, below the error; what the user got wrong
ends in one message that names the key and the remedy and in exit code 2, without a traceback (`ARBORIST_DEBUG=1` shows
it, and every log line this file silences).
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils import logging as transformers_logging

from app import interruption
from app.cli.configuration import (
    check_checkpoint,
    check_config_files,
    check_parts,
    check_run_dir,
    check_trainer,
    check_values,
    install_reader,
    restarted_by_agent,
)
from app.cli.errors import ArboristParser, Making, cut, is_ours, users_mistake
from app.cli.overlays import kept_options
from app.cli.runs import run_directory
from app.cli.runs.continued import SavedConfig
from app.cli.runs.default_callbacks import OPTIONAL, check_without, with_defaults
from app.cli.runs.early_end import why_early
from app.cli.runs.last_checkpoint import LAST, last_checkpoint, last_checkpoints, to_load
from app.cli.runs.loggers import Metrics, go_on_in_mlflow, go_on_in_wandb, keep_metrics
from app.cli.runs.run_directory import RunDirectory
from app.clients import no_keys_needed
from app.interruption import End, Interrupted, end_of
from app.text import nobody_reads, print_exception, printable, printable_output
from callbacks.hang_dump import install
from callbacks.report.callback import PAGE

_OF_TRAINER = ("fit", "validate", "test", "predict")  # Lightning's commands
# Loaded when asked for: each is a file with `add_arguments(parser)` and `run(args)`, its docstring the help.
VERBS = {
    "data": "datamodules.conversations.importers",
    "check": "app.cli.check",
    "compare": "app.cli.compare",
    "inspect": "app.cli.inspect",
    "look": "app.cli.look",
    "bench": "app.cli.bench",
    "serve": "app.cli.serve",
    "gateway": "app.cli.gateway",
    "export": "app.cli.export",
    "reward": "app.cli.reward",
    "doctor": "app.cli.doctor",
}

_TRAINER_DEFAULTS = {
    "strategy": {"class_path": "app.strategies.DTAStrategy"},
    "use_distributed_sampler": False,  # rank 0 owns the stream and ships it
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,  # an RL step takes long, and every one counts
    "enable_model_summary": False,  # the model is built after the summary would be made
}

_RUN_DIR_VARIABLE = "ARBORIST_RUN_DIR"

# Lightning's advice that does not apply here. Warnings of other libraries and of other kinds stay.
_HARMLESS = (
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*resuming from a checkpoint that ended before the epoch.*",  # the datamodule's state holds the stream
    r".*The dirpath has changed from.*",  # every launch has a run directory of its own
    r".*Experiment logs directory .* exists and is not empty.*",  # made by this file, or holding a warm start
    r".*Total length of `list` across ranks is zero.*",  # no validation prompts
    r".*You defined a `validation_step` but have no `val_dataloader`.*",  # supervised warm starts have none
    r"Found \d+ module\(s\) in eval mode at the start of training.*",  # the frozen reference's
    r".*`is_gradient_checkpointing` is deprecated.*",  # PEFT asks for it as it saves
    r"Be aware that when using `ckpt_path`.*callbacks: \[\"SaveLast{.*}\"\]\.$",  # saves, and keeps nothing of it
)


class ArboristCLI(LightningCLI):
    """LightningCLI with this project's defaults, its run directories and `--run_dir`."""

    def __init__(self, args: list[str] | None = None) -> None:
        self._first = (sys.argv[1:] if args is None else args)[:1]
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SavedConfig,
            trainer_defaults=dict(_TRAINER_DEFAULTS),
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=ArboristParser,
            parser_kwargs={
                "description": f"Asynchronous RL post-training on Lightning. More verbs: {', '.join(VERBS)}."
            },
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:
        """The one that comes first, as a rule: parsers for the other three would be half of what understanding a
        command takes. All of them for the help, and where something else comes first."""
        known: dict[str, set[str]] = LightningCLI.subcommands()
        return {name: known[name] for name in self._first if name in known} or known

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="where this run writes; a fresh runs/<config name>/<time> when left out",
        )
        parser.add_argument(
            "--without_callbacks",
            type=list[str] | None,
            default=None,
            help=f"callbacks to leave out, of those that a run gets without being asked: {', '.join(OPTIONAL)}",
        )

    def parse_arguments(self, parser: Any, args: Any) -> None:
        """Imports what the configuration names, modules of agents and their rewards too."""
        with no_keys_needed():
            super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Keeps YAML and flags as they are: Lightning would let the checkpoint's hyper-parameters overrule them. The
        first hook after parsing: what is refused here has done nothing."""
        subcommand = self.config.get("subcommand")
        if subcommand is None:
            return
        config = self.config[subcommand].as_dict()
        check_values({name: value for name, value in config.items() if name != "config"})
        check_parts(config)
        check_trainer(config.get("seed_everything"), config["trainer"])
        check_run_dir(config.get("run_dir"))
        check_without(config["without_callbacks"] or ())
        directories = _checkpoint_directories(config["trainer"])
        check_checkpoint(config.get("ckpt_path"), config.get("run_dir"), directories, subcommand)
        if _leads():
            for line in kept_options([Path(str(file)) for file in config.get("config") or ()], config):
                sys.stderr.write(f"{printable(line)}\n")

    def before_instantiate_classes(self) -> None:
        self._asked_run_dir = self._get(self.config, "run_dir")
        self._asked_ckpt_path = self._get(self.config, "ckpt_path")
        # Not part of the configuration that is saved: that one starts a new run, elsewhere.
        self.config[self.subcommand]["run_dir"] = None
        if self._asked_ckpt_path == LAST:  # of this directory; one that goes by its own name starts a new run, too
            self.config[self.subcommand]["ckpt_path"] = None

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        ckpt_path = to_load(self._asked_ckpt_path, self.trainer, _saved_in)
        return super()._prepare_subcommand_kwargs(subcommand) | {"ckpt_path": ckpt_path}

    def instantiate_classes(self) -> None:
        """With `seed_everything` as the seed of the draws where a part names none of its own. What is saved names none
        either: the next run from it takes that of its own `seed_everything`."""
        config = self.config[self.subcommand]
        self.parser.add_instantiator(making := Making(), object)
        unsaid = [key for key in ("data.init_args.seed", "model.init_args.seed") if config.get(key, 0) is None]
        try:
            for key in unsaid:
                config[key] = config["seed_everything"]
            super().instantiate_classes()
        except ValueError as error:
            if users_mistake(error) is None and (cause := making.cause(error)) not in (None, error):
                raise error from cause
            raise
        finally:
            for key in unsaid:
                config[key] = None
        # Loggers are told what Lightning calls hyper-parameters: by themselves modules would name the model's alone.
        said = yaml.safe_load(self._parser(self.subcommand).dump(config, skip_none=False))
        own = self.datamodule.hparams
        if not own or self.datamodule._log_hyperparams:  # else it has said that loggers are to be told nothing of it
            more = {"data", "trainer", "seed_everything"} - own.keys() - self.model.hparams.keys()  # theirs stay theirs
            self.datamodule.save_hyperparameters({key: said[key] for key in sorted(more)})

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds what every run needs and no configuration should have to say: run directory, metrics.csv, callbacks."""
        given = self._get(self.config_init, "trainer")
        callbacks = with_defaults(
            _as_list(given.get("callbacks")),
            self._get(self.config, "without_callbacks") or (),
            str(self.subcommand),
            given,
            self.model,
            self.datamodule,
        )
        run_dir = self._choose_run_dir()
        _answer_the_doctor(run_dir)
        kwargs.setdefault("default_root_dir", given.get("default_root_dir") or str(run_dir))
        kwargs.setdefault("logger", _with_csv(given.get("logger"), run_dir))
        if self.subcommand == "fit" and _leads():
            for logger in _as_list(given.get("logger")):
                if isinstance(logger, WandbLogger) and logger.version is None:  # else the user names its run
                    go_on_in_wandb(logger, run_dir)
                if isinstance(logger, MLFlowLogger):
                    go_on_in_mlflow(logger)
        agents = os.environ.get("GROUP_WORLD_SIZE")  # of torchrun, one a node: with `--nnodes MIN:MAX` they alone know
        if agents is not None and given.get("num_nodes") in (None, 1):
            kwargs.setdefault("num_nodes", int(agents))
        started = os.environ.get("LOCAL_WORLD_SIZE") if agents is not None else None
        if started is not None and given.get("devices") in (None, "auto"):  # Lightning would count GPUs, or say 1
            kwargs.setdefault("devices", int(started))
        if given.get("accelerator") in (None, "auto") and MPSAccelerator.is_available():
            kwargs.setdefault("accelerator", "cpu")  # of Apple's GPU, which Lightning would take, nothing here knows
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:  # the Trainer refuses a value of the user's
            raise MisconfigurationException(f"trainer: {error}") from None
        trainer.callbacks.sort(key=lambda one: not isinstance(one, SavedConfig))  # the first may validate, for minutes
        if started is not None and trainer.num_devices != int(started):
            raise ValueError(
                f"trainer.devices: {trainer.num_devices}, but torchrun started {started} processes on this machine"
                " (--nproc_per_node): leave devices out, or make them equal"
            )
        return trainer

    def after_fit(self) -> None:
        if _leads() and (why := why_early(self.trainer)):
            sys.stderr.write(f"{printable(why)}\n")

    def _choose_run_dir(self) -> Path:
        elsewhere = _checkpoint_directories(self.config[self.subcommand].as_dict()["trainer"])
        if not _leads():
            # Nothing is written there: only rank 0 writes, and `trainer.log_dir` is its answer on every rank.
            path = Path(self._asked_run_dir or "runs")
            _saved_in[:] = [path / "checkpoints", *elsewhere]
            return path
        if self._asked_run_dir is None:
            path = _hold(run_directory.fresh(self._run_name()))
            _saved_in[:] = [path / "checkpoints", *elsewhere]
            sys.stderr.write(f"{_where(path)}\n")
            return path
        directory = RunDirectory(Path(self._asked_run_dir))
        path = _hold(directory)
        _saved_in[:] = [path / "checkpoints", *elsewhere]
        if directory.holds_a_run() and (self.subcommand != "fit" or self._asked_ckpt_path != LAST):
            remedy = (
                "; name another directory, leave run_dir out, or go on with that run: fit --ckpt_path last"
                if last_checkpoints(_saved_in)
                else ", which saved no checkpoint; remove it, name another directory, or leave run_dir out"
            )
            raise ValueError(f"run_dir: {path} already holds a run{remedy}")
        return path

    def _run_name(self) -> str:
        configs = self._get(self.config, "config") or []
        path = Path(str(configs[-1])) if configs else Path("run")
        if path.name == "config.yaml" and path.absolute().parent.name:  # saved in a run directory
            name = run_directory.name_of(path.absolute().parent)
        else:
            name = path.stem
        return name if self.subcommand == "fit" else f"{name}_{self.subcommand}"


_held: list[RunDirectory] = []  # the run directory of this process, whose lock it keeps to its end
_saved_in: list[Path] = []  # where the run's checkpoints are, the run directory's first


def _hold(directory: RunDirectory) -> Path:
    _held.append(directory)
    return directory.path


def _where(run_dir: Path) -> str:
    """The line that says where a run writes, and where its report is, if it has one."""
    report = run_dir / PAGE
    return f"run directory: {run_dir}" + (f", report: {report}" if report.exists() else "")


def _leads() -> bool:
    """Whether this is the process that writes the run directory: rank 0 of the first node."""
    return (rank_zero_only.rank or 0) == 0 and os.environ.get("NODE_RANK", "0") == "0"


def _checkpoint_directories(trainer: Mapping[str, Any]) -> list[Path]:
    """Where the configuration's own callbacks, and its root directory, have checkpoints."""
    callbacks = [one for one in _as_list(trainer.get("callbacks")) if isinstance(one, Mapping)]
    models = ".SavePretrained"  # which has a dirpath too
    configured = [one.get("init_args") or {} for one in callbacks if not str(one.get("class_path")).endswith(models)]
    found = [Path(str(options["dirpath"])) for options in configured if options.get("dirpath")]
    root = trainer.get("default_root_dir")
    return [*found, *([Path(str(root)) / "checkpoints"] if root else [])]


def _answer_the_doctor(run_dir: Path) -> None:
    """From here on, not only from `HangDump.setup` on: a run may hang where its ranks meet, or building its model."""
    rank = rank_zero_only.rank or 0
    if _leads():
        os.environ[_RUN_DIR_VARIABLE] = str(run_dir.absolute())  # for the ranks that this one launches
    directory = os.environ.get(_RUN_DIR_VARIABLE)
    if directory is not None:
        install(Path(directory), rank)


def _with_csv(logger: Any, run_dir: Path) -> list[Logger] | bool:
    """The user's loggers behind a CSVLogger for `run_dir` (the first logger decides `trainer.log_dir`): one of theirs
    that writes there, or this project's. One that writes elsewhere does so besides."""
    if logger is False:
        return False
    given = [] if logger is True else _as_list(logger)
    there = [one for one in given if isinstance(one, CSVLogger) and Path(one.log_dir).absolute() == run_dir.absolute()]
    if there:
        if _leads():
            keep_metrics(run_dir)
    else:
        there = [Metrics(str(run_dir.parent), name="", version=run_dir.name, flush_logs_every_n_steps=1)]
    return [*there, *(one for one in given if one not in there)]


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def main(argv: list[str] | None = None) -> None:
    """Runs one command (`sys.argv` when `argv` is None); a user's mistake ends in exit code 2, Ctrl-C in 130, SIGTERM
    in 143."""
    if argv is None:  # a process of its own
        sys.excepthook = print_exception
    args = sys.argv[1:] if argv is None else argv
    if os.getcwd() not in sys.path:  # the console script leaves it out, and a user's own classes are named in YAML
        sys.path.insert(0, os.getcwd())
    debug = os.environ.get("ARBORIST_DEBUG", "0") not in ("", "0")
    if not debug:
        _quiet()
    install_reader()
    try:
        with printable_output():
            if args and args[0] in VERBS:
                _run_verb(args[0], args[1:])
            elif args and not args[0].startswith("-") and args[0] not in _OF_TRAINER:
                commands = [*_OF_TRAINER, *VERBS]
                close = difflib.get_close_matches(args[0], commands, n=1)
                told = f"did you mean '{close[0]}'?" if close else f"commands are {', '.join(commands)}"
                raise ValueError(f"there is no command '{args[0]}'; {told}")
            else:
                check_config_files(args)
                _run_trainer(argv, fits=args[:1] == ["fit"])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            sys.exit(128 + signal.SIGPIPE)
        mistake = users_mistake(error)
        if debug or mistake is None:
            raise
        said = "\n".join(map(cut, printable(str(mistake)).splitlines()))
        sys.stderr.write(f"error: {said}\n(ARBORIST_DEBUG=1 shows where it was raised)\n")
        if end_of(error) is not None:
            sys.stderr.write("".join(f"{printable(note)}\n" for note in getattr(error, "__notes__", ())))
        sys.exit(2)  # by the function, of which W&B has made its own: it calls a run finished that ends otherwise


def _run_trainer(argv: list[str] | None, fits: bool) -> None:
    try:
        with interruption.listening():
            _leave_process_group(ArboristCLI(argv))
        if fits and _held:
            sys.stderr.write(f"{_where(_held[0].path)}\n")
    except Interrupted as interrupted:
        _say_goodbye(interrupted.signum, end_of(interrupted), fits)
    except (KeyboardInterrupt, SystemExit) as end:  # Lightning ends with code 1 after KeyboardInterrupt
        signum = interruption.received()
        asked = isinstance(end, KeyboardInterrupt) or isinstance(end.__context__, KeyboardInterrupt)
        if signum is None or not asked:
            raise
        _say_goodbye(signum, None, fits)
    except Exception as error:
        failed = end_of(error)
        if failed is not None and _is_launched():
            raise SystemExit(0) from None  # rank 0, which launched it, tells
        if failed is not None and failed.steps > 0 and _leads():
            error.add_note(_how_to_go_on(failed, fits))  # the last that is said, below a traceback too
        raise
    finally:
        while _held:
            _held.pop().close()


def _say_goodbye(signum: int, end: End | None, fits: bool) -> NoReturn:
    """What was saved, and the command that goes on, or begins anew where nothing is; exit code 128 + `signum`."""
    if _leads():
        told = end if end is not None else "ended, nothing new was saved"
        go_on = _how_to_go_on(end, fits)
        sys.stderr.write(f"\n{signal.Signals(signum).name}: {told}\n{go_on}" + ("\n" if go_on else ""))
    # The process that launched this rank takes any other code for a failure, and ends the others.
    code = 0 if end is not None and _is_launched() else 128 + signum
    if "WANDB_SWEEP_ID" in os.environ:  # its agent ends runs early, which are no failures: W&B is not told
        raise SystemExit(code) from None
    sys.exit(code)


def _is_launched() -> bool:
    """Whether another rank of this machine launched this one, and watches over how it ends."""
    return "LOCAL_RANK" in os.environ and not _leads() and not restarted_by_agent()


def _how_to_go_on(end: End | None, fits: bool) -> str:
    """Lines: the run directory and the command that goes on with what was saved, now or before; "" without a run."""
    path = _held[0].path if _held else None
    if path is None:
        return ""
    checkpoint = end.checkpoint if end is not None else None
    last = checkpoint or last_checkpoint(_saved_in)
    if last is not None and end is not None and end.finished:
        return f"all steps are done; score the model with: {_command('validate', path, '--ckpt_path', str(last))}"
    if last is not None:
        return f"{_where(path)}\ngo on with: {going_on(path)}"
    if fits and (path / "config.yaml").exists():  # which names no run directory
        return f"no checkpoint in {path / 'checkpoints'}; start again with: {_command('fit', path)}"
    return ""


def going_on(run_dir: Path) -> str:
    """The command that goes on with the run in `run_dir`."""
    return _command("fit", run_dir, "--run_dir", str(run_dir), "--ckpt_path", LAST)


def _command(subcommand: str, run_dir: Path, *flags: str) -> str:
    return shlex.join(["python", "-m", "app", subcommand, "--config", str(run_dir / "config.yaml"), *flags])


def _leave_process_group(cli: ArboristCLI) -> None:
    """Joins gloo's threads before the interpreter ends: one that lets go of its last tensor during that end aborts
    the process (seen in 1 of 10 two-rank runs), and the launcher then ends the other ranks."""
    if dist.is_initialized():
        cli.__dict__.clear()  # the threads end with the last reference to their group; jsonargparse keeps the CLI alive
        gc.collect()
        dist.destroy_process_group()


def _run_verb(verb: str, args: list[str]) -> None:
    module = importlib.import_module(VERBS[verb])
    parser = argparse.ArgumentParser(
        prog=f"arborist {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    exit_code = module.run(parser.parse_args(args))
    if exit_code is not None:
        raise SystemExit(exit_code)


def _quiet() -> None:
    """Silences start-up chatter and known-harmless advice, here and in the ranks a launcher starts; what this project
    warns of is an ordinary line."""
    warnings.formatwarning = _plain_warning
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("lightning.fabric.utilities.seed", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # PEFT imports bitsandbytes where it is there, which looks for a faster kernel on a hub, whoever needs it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # a bar for every load and save of a model
    for message in _HARMLESS:
        warnings.filterwarnings("ignore", message=message)


_with_source = warnings.formatwarning


def _plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of this project is for whoever runs it: its category, and the line that raised it, say nothing."""
    if is_ours(filename):
        return f"warning: {printable(str(message))}\n"
    return _with_source(message, category, filename, lineno, line)
