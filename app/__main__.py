"""`python -m app ...`: the same as the console script `arborist ...`.

Promises: `--help` answers at once, before the seconds that Lightning and transformers take to be imported, which are a
fifth fewer while nothing looks for garbage; on GPUs torch's allocator maps memory in expandable segments, unless the
environment says how: lengths change from step to step, and fixed blocks of all sizes would be free and of no use. A
Python that is not the project's is told so in a line. Output that nobody reads any more (`| head`) ends a command
quietly; one that is closed (`>&-`) ends none.
"""

import atexit
import gc
import os
import signal
import sys

from app.text import nobody_reads

HELP = """\
usage: arborist COMMAND [OPTIONS]        arborist COMMAND --help says more

Asynchronous RL post-training of language-model agents on Lightning.

  fit         train: --config FILE.yaml [--key value ...]; --print_config shows what a run would use
  validate    score held-out prompts
  predict     roll out without training
  test        as validate, on the test loader

  data        make data files from checkouts of the public repositories they come from
  check       go or no-go: whether there is anything to learn, what a step costs, what fits, what to change first
  compare     two models on the same prompts: which is better, by how much, and how sure that is
  inspect     what a tree saves on recorded data, and what fits in memory
  look        one page about runs, finished or going on, or about recordings: curves, trees, transcripts
  bench       how fast the tree engine is on this machine
  serve       start SGLang servers
  gateway     an OpenAI- and Anthropic-compatible API in front of a model or a provider, recording what agents do
  export      a checkpoint as a model directory
  reward      try a reward on recorded or labelled transcripts before a run trusts it
  doctor      what this machine has, and what a run that hangs is doing
"""


def main() -> None:
    """As `app.cli.main`, and Ctrl-C ends without a traceback while the imports still run (seconds)."""
    _open_what_is_closed()
    end: SystemExit | None = None
    try:
        try:
            _command()
        except SystemExit as asked:
            end = asked
        sys.stdout.flush()  # not at the interpreter's end, which says what it cannot write
    except BrokenPipeError:
        if not nobody_reads():
            raise
        if end is None or not end.code:  # a failure stays one
            end = SystemExit(128 + signal.SIGPIPE)
    if end is not None:
        raise end from None


def _open_what_is_closed() -> None:
    """Of the standard streams, which Python has as None then. The next file that is opened would get the number of one,
    and what processes print that this one starts."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)  # by the processes that this one starts
            setattr(sys, name, open(number, "r" if number == 0 else "w"))  # noqa: SIM115


def _command() -> None:
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(HELP, end="", file=sys.stdout if sys.argv[1:] else sys.stderr)
        sys.exit(0 if sys.argv[1:] else 2)
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported
    gc.disable()  # imports leave next to none, and each search goes through all they made
    try:
        from app.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name in ("fcntl", "resource"):
            told = "Windows is supported within WSL only, and this Python runs outside of it"
        elif error.name in ("torch", "lightning", "transformers"):
            told = (
                f"{sys.executable} has no {error.name}; use the environment that `make` made: source"
                " .venv/bin/activate, or .venv/bin/python -m app"
            )
        else:
            raise
        print(f"error: {told}", file=sys.stderr)
        sys.exit(2)
    gc.freeze()  # what was imported stays, and no later search goes through it, but for the one at the end
    gc.enable()
    atexit.register(gc.unfreeze)
    run()


if __name__ == "__main__":
    main()
