"""`arborist export --ckpt DIR --out DIR`: a checkpoint's policy as a Hugging Face directory.

Promises: what is written loads with transformers' auto class of the model, on this project's `model: {path: ...}` and
on inference servers; adapters are merged, or written alone as PEFT has them (`--adapter`). One process, CPU memory for
one copy of the weights; the checkpoint is only read, and `--out` appears when it is complete. A checkpoint from
somebody else is data: it names no file that is written and no code that is run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from app.strategies.checkpoint.checkpoints import CheckpointError
from app.strategies.checkpoint.trainer_state import ADAPTER_FILE, CONFIGURATIONS, GENERATION_FILE, model_weights
from app.tree import auto_class
from datamodules.inference.served_config import save_merged

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--ckpt", type=Path, required=True, help="checkpoint directory written by DTAStrategy")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist or be empty")
    parser.add_argument("--model", default="policy", help="which model of the LightningModule (default: policy)")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: the checkpoint's)")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, not merged into its model")
    parser.add_argument("--tokenizer", help="directory or hub name of the tokenizer to put beside the weights")


def run(arguments: argparse.Namespace) -> None:
    """Exports and says what was written."""
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
    export(arguments.ckpt, arguments.out, arguments.model, dtype, arguments.tokenizer, arguments.adapter)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 2**20:.1f} MiB")
    if arguments.tokenizer is None:
        print("without a tokenizer (--tokenizer NAME puts one beside the weights)")


def export(
    ckpt: Path,
    out: Path,
    model: str = "policy",
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    adapter: bool = False,
) -> None:
    """Writes `model` of the checkpoint `ckpt` to `out`, in `dtype` (None: as in the checkpoint); an
    adapter merged, or, with `adapter`, alone.

    Raises:
        ValueError: `out` holds something, `ckpt` is no checkpoint directory or has no such model or no adapter, or its
            weights do not fit its own configuration.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} already holds something; name another directory")
    try:
        files, weights = model_weights(ckpt, model)
    except CheckpointError as error:
        raise ValueError(f"--ckpt: {str(error).removeprefix('ckpt_path: ')}") from error
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as made:
        target = Path(made) / "model"
        made_model = _rebuild(files, weights, ckpt, adapter)
        if dtype is not None:
            made_model = made_model.to(dtype)
        if adapter:
            made_model.save_pretrained(target)
        else:
            save_merged(made_model, target)
        if GENERATION_FILE in files and not adapter:
            # As it is: transformers refuses to write what it reads with a warning.
            (target / GENERATION_FILE).write_text(files[GENERATION_FILE])
        if tokenizer is not None:
            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
        if out.exists():
            out.rmdir()
        shutil.move(target, out)


def _rebuild(files: Mapping[str, str], weights: dict[str, Tensor], ckpt: Path, adapter: bool) -> Any:
    if adapter and ADAPTER_FILE not in files:
        raise ValueError(f"--adapter: {ckpt} holds a model without one; leave it out")
    for name, text in files.items():
        if name not in CONFIGURATIONS or not isinstance(text, str):
            raise ValueError(
                f"--ckpt: {ckpt} holds a configuration named {name!r:.200}; only {', '.join(CONFIGURATIONS)} belong"
                " there, so this project did not write it: export a checkpoint whose origin you know"
            )
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            (Path(directory) / name).write_text(text)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
        # Explicit: a configuration may name attention kernels of the hub, which are code.
        model: Any = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
        adapted = ADAPTER_FILE in files
        if adapted:
            import peft  # only those who train adapters have it

            options = peft.PeftConfig.from_pretrained(directory)
            model.name_or_path = options.base_model_name_or_path or ""  # which the adapter goes on naming
            model = peft.get_peft_model(model, options)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"--ckpt: the weights in {ckpt} do not fit their own configuration: {len(missing)} are missing"
            f" {missing[:3]}, {len(unexpected)} are unknown {unexpected[:3]}"
        )
    return model.merge_and_unload() if adapted and not adapter else model
