"""Starts a run as a job of Lightning's platform, on one GPU machine or several, in the environment of a Studio.

    pip install lightning-sdk && lightning login
    python examples/studio.py --studio OWNER/TEAMSPACE/STUDIO --machine H100_X_8 --machines 2 --name airline-1 \\
        --train_gpus 4 --config configs/experiments/tau_airline_grpo.yaml --run_dir FOLDER/airline --dry_run \\
        -- --trainer.max_steps 500

Once, in the Studio: clone this repository, `make quickstart`. Every machine gets a copy of the Studio, checkout and
`.venv` too. FOLDER is one that all machines share and that outlives them: ranks write checkpoints, each its part.

Promises: `--dry_run` prints what would be started, as JSON, starts nothing and does not need the SDK. Arguments after a
`--` go to `fit` as they are. The same command under another --name goes on from the last checkpoint in --run_dir.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any


def command(options: argparse.Namespace, more: Sequence[str]) -> str:
    """What every machine runs, in bash that ends with the first line that fails.

    The platform tells machines where the first of them is. Under torchrun `last` need not be a checkpoint yet.
    """
    meeting = "--standalone"
    if options.machines > 1:
        meeting = (
            f'--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id {shlex.quote(options.name)}'
        )
    fit = ["--config", options.config, "--run_dir", options.run_dir, "--ckpt_path", "last"]
    fit += ["--trainer.num_nodes", str(options.machines), "--trainer.devices", str(options.train_gpus), *more]
    return (
        f"cd {shlex.quote(options.checkout)}\n"
        f".venv/bin/python -m torch.distributed.run --nnodes {options.machines} {meeting}"
        f" --nproc-per-node {options.train_gpus}"
        f" --max-restarts 3 -m app fit {shlex.join(fit)}\n"
    )


def job(options: argparse.Namespace, more: Sequence[str]) -> dict[str, Any]:
    """Arguments of `lightning_sdk.Job.run`, all but `studio`. (`MMT` is the SDK's old name for several machines.)"""
    return {
        "name": options.name,
        "machine": options.machine,
        "num_machines": options.machines,
        "interruptible": options.interruptible,
        "command": command(options, more),
    }


def studio(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `lightning_sdk.Studio`; a name that does not exist is an error, no new Studio."""
    teamspace, _, name = options.studio.rpartition("/")
    return {"name": name, "teamspace": teamspace, "create_ok": False}


def main(given: Sequence[str]) -> None:
    end = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="Starts a run as a job in the environment of a Lightning Studio.")
    parser.add_argument("--studio", required=True, metavar="OWNER/TEAMSPACE/STUDIO")
    parser.add_argument("--name", required=True, help="of the job; a new one each time")
    parser.add_argument("--machine", required=True, help="as the SDK names it: L4, H100_X_8, ...")
    parser.add_argument("--machines", type=int, default=1, metavar="N", help="of that kind (default: 1)")
    parser.add_argument(
        "--train_gpus", type=int, default=1, metavar="N", help="of each that train; servers have others (default: 1)"
    )
    parser.add_argument("--config", required=True, metavar="YAML", help="in the checkout")
    parser.add_argument("--run_dir", required=True, metavar="DIR", help="in a folder that all machines share")
    parser.add_argument("--checkout", default="arborist", metavar="DIR", help="in the Studio (default: arborist)")
    parser.add_argument("--interruptible", action="store_true", help="cheaper machines that may be taken away")
    parser.add_argument("--dry_run", action="store_true", help="print what would be started")
    options = parser.parse_args(given[:end])
    if options.studio.count("/") != 2:
        parser.error(f"--studio: '{options.studio}' is not OWNER/TEAMSPACE/STUDIO")
    if not options.run_dir.startswith("/"):
        parser.error(
            f"--run_dir: '{options.run_dir}' would be in each machine's own copy of the Studio, and end with it; name a"
            " folder from / on that all machines share"
        )
    for name in ("machines", "train_gpus"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)} is not 1 or more")
    more = given[end + 1 :]
    if options.dry_run:
        print(json.dumps({"studio": studio(options), "job": job(options, more)}, indent=2))
        return
    try:
        from lightning_sdk import Job, Studio
    except ImportError:
        sys.exit("the SDK is missing: pip install lightning-sdk")
    started = Job.run(studio=Studio(**studio(options)), **job(options, more))
    print(started.link)


if __name__ == "__main__":
    main(sys.argv[1:])
