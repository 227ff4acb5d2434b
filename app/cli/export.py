"""`arborist export --ckpt DIR --out DIR`: a checkpoint's policy as a Hugging Face directory, with its run's tokenizer
and, of a model that sees, image processor.

Promises: what is written loads with transformers' auto class of the model, on this project's `model: {path: ...}` and
on inference servers; adapters are merged, or written alone as PEFT has them (`--adapter`); what transformers keeps in
float32 is not rounded by `--dtype`. One process, CPU memory for what fills one file (4 GB at most, twice while it is
written) and a layer, whatever the size of the model; the checkpoint is only read, and `--out` appears when it is
complete. A checkpoint from somebody else is data: it names no file that is written and no code that is run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from app.cli.runs.last_checkpoint import last_checkpoint
from app.cli.runs.run_directory import naming, run_of
from app.hub import check_reachable
from app.strategies.checkpoint.checkpoints import MANIFEST_FILE, CheckpointError
from app.strategies.checkpoint.trainer_state import ADAPTER_FILE, CONFIGURATIONS, GENERATION_FILE, SavedModel
from app.text import reason, why_not
from app.tree import auto_class, picture_processor
from datamodules.inference.export import WeightParts, base_model, in_dtype
from datamodules.inference.weight_files import SHARD_BYTES, save_adapter, save_model
from datamodules.prompts.tokenizers import load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHARACTERS = "char:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--ckpt", type=Path, required=True, help="run directory (its last checkpoint), or a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not exist or be empty")
    parser.add_argument("--model", default="policy", help="which model of the LightningModule (default: policy)")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (default: the checkpoint's)")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, not merged into its model")
    parser.add_argument(
        "--tokenizer", help="directory or hub name of the tokenizer beside the weights (default: its run's)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Exports and says what was written."""
    dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
    ckpt = _last(arguments.ckpt)
    tokenizer, why = _tokenizer_of_run(run_of(ckpt))
    tokenizer = arguments.tokenizer or tokenizer
    place, images = _images_of_run(run_of(ckpt), tokenizer)
    with naming(arguments.out, "--out"):
        export(ckpt, arguments.out, arguments.model, dtype, tokenizer, arguments.adapter, images=images)
    size = sum(file.stat().st_size for file in arguments.out.iterdir())
    print(f"{arguments.out}: {size / 2**20:.1f} MiB, of {ckpt}")
    print(f"tokenizer: {tokenizer or f'none{why}; --tokenizer NAME puts one beside the weights'}")
    if images is not None:
        print(f"image processor: {place}")


def _last(path: Path) -> Path:
    """The last checkpoint of a run; any other path as it is."""
    saved_in = path / "checkpoints"
    last = last_checkpoint([saved_in])
    if (path / "config.yaml").is_file() and last is None:
        raise ValueError(
            f"--ckpt: {path} is a run without a checkpoint ({saved_in / 'last.ckpt'}); wait for one, or name another"
        )
    return path if last is None else last


def _tokenizer_of_run(run: Path) -> tuple[str | None, str]:
    """What the run's configuration says, or the model that it began with where recorded tokens needed none, if it is
    here and can be had without the run's prompts; and why there is none."""
    if (run / "tokenizer").is_dir():
        return str(run / "tokenizer"), ""
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
        given = [(settings.get("data") or {}, "tokenizer"), (settings.get("model") or {}, "model")]
        named = [(part.get("init_args") or {}).get(key) for part, key in given]
    except (OSError, ValueError, yaml.YAMLError, AttributeError):
        return None, ""
    data, model = named[0], named[1].get("path") if isinstance(named[1], dict) else None
    if isinstance(data, str) and (data.startswith(_CHARACTERS) or Path(data).is_dir()):
        return data, ""
    if data is None and isinstance(model, str) and (Path(model) / "tokenizer_config.json").is_file():
        return model, ""
    return None, f", as the run's '{data or model}' has none here" if data or model else ""


def _images_of_run(run: Path, tokenizer: str | None) -> tuple[str, Any | None]:
    """The processor of its pictures, and where it is: with the tokenizer, or with the model that the run began with."""
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
        model = settings["model"]["init_args"]["model"]["path"]
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        model = None
    for place in (tokenizer, model):
        if isinstance(place, str) and Path(place).is_dir():
            try:
                images = picture_processor(place)
            except Exception as error:  # as of tokenizers
                raise ValueError(
                    f"the image processor in {place} cannot be read: {reason(error)}; mend its"
                    " preprocessor_config.json, or move it away to export without"
                ) from error
            if images is not None:
                return place, images
    return "", None


def export(
    ckpt: Path,
    out: Path,
    model: str = "policy",
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    adapter: bool = False,
    shard_bytes: int = SHARD_BYTES,
    images: Any | None = None,
) -> None:
    """Writes `model` of the checkpoint `ckpt` to `out`, in `dtype` (None: as in the checkpoint); an
    adapter merged, or, with `adapter`, alone; at most `shard_bytes` of tensors in one file; `images`: the image
    processor that goes with it, as `picture_processor` gives it.

    Raises:
        ValueError: `out` holds something, `ckpt` is no checkpoint directory or has no such model or no adapter, or its
            weights do not fit its own configuration; or `tokenizer` names none ("char:<alphabet>" is one).
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} already holds something; name another directory")
    try:
        saved = SavedModel(ckpt, model)
    except CheckpointError as error:
        hint = "" if (ckpt / MANIFEST_FILE).exists() else "; name a run, or RUN/checkpoints/last.ckpt"
        raise ValueError(f"--ckpt: {str(error).removeprefix('ckpt_path: ')}{hint}") from None
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    text = None if tokenizer is None else _tokenizer(tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as made:
        target = Path(made) / "model"
        like = _without_storage(saved, ckpt, adapter)
        if adapter:
            save_adapter(like, target, state_dict=in_dtype(like, saved.fetch(_of_adapter(like)), dtype))
        else:
            base = base_model(like)
            inside = next(f"{path}." if path else "" for path, part in like.named_modules() if part is base)

            def fetch(names: Iterable[str]) -> dict[str, Tensor]:
                found = saved.fetch([inside + name for name in names])
                return {name.removeprefix(inside): tensor for name, tensor in found.items()}

            parts = WeightParts(like, fetch, like).saved(dtype)
            save_model(like, target, parts, dtype, shard_bytes)
        if GENERATION_FILE in saved.files and not adapter:
            # As it is: transformers refuses to write what it reads with a warning.
            (target / GENERATION_FILE).write_text(saved.files[GENERATION_FILE])
        if text is not None:
            text.save_pretrained(target)
        if images is not None:
            images.save_pretrained(target)
        if out.exists():
            out.rmdir()
        shutil.move(target, out)


def _tokenizer(name: str) -> Any:
    try:
        if name.startswith(_CHARACTERS):
            return load_tokenizer(name)
        check_reachable(name, "tokenizer_config.json")
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # files that are cut or of another kind fail anywhere in transformers
        raise ValueError(f"--tokenizer: '{name}' holds no tokenizer: {why_not(error)}") from error


def _of_adapter(model: Any) -> list[str]:
    """The names in PEFT's `model` of what PEFT writes of it."""
    import peft  # only those who train adapters have it

    state = model.state_dict()
    written = {id(tensor) for tensor in peft.get_peft_model_state_dict(model, state_dict=state).values()}
    return [name for name, tensor in state.items() if id(tensor) in written]


def _without_storage(saved: SavedModel, ckpt: Path, adapter: bool) -> Any:
    """A model of its configuration, adapters and all, whose tensors are meta tensors."""
    if adapter and ADAPTER_FILE not in saved.files:
        raise ValueError(f"--adapter: {ckpt} holds a model without one; leave it out")
    for name, text in saved.files.items():
        if name not in CONFIGURATIONS or not isinstance(text, str):
            raise ValueError(
                f"--ckpt: {ckpt} holds a configuration named {name!r:.200}; only {', '.join(CONFIGURATIONS)} belong"
                " there, so this project did not write it: export a checkpoint whose origin you know"
            )
    with tempfile.TemporaryDirectory() as directory:
        for name, text in saved.files.items():
            (Path(directory) / name).write_text(text)
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        for part in (config, config.get_text_config()):
            if not saved.tied and getattr(part, "tie_word_embeddings", False):
                part.tie_word_embeddings = False  # it had two tensors, whatever its configuration says
        scores = any("score" in name.split(".") for name in saved.tensors)  # a reward model's one output
        kind: Any = AutoModelForSequenceClassification if scores else auto_class(config)
        largest = max(saved.tensors.values(), key=lambda tensor: tensor.numel())
        with torch.device("meta"):
            # Explicit: a configuration may name attention kernels of the hub, which are code.
            model: Any = kind.from_config(
                config, dtype=largest.dtype, attn_implementation="eager", trust_remote_code=False
            )
            if ADAPTER_FILE in saved.files:
                import peft

                options = peft.PeftConfig.from_pretrained(directory)
                model.name_or_path = options.base_model_name_or_path or ""  # which the adapter goes on naming
                model = peft.get_peft_model(model, options)
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - saved.tensors.keys()), sorted(saved.tensors.keys() - own.keys())
    other = sorted(n for n in own.keys() & saved.tensors.keys() if own[n].shape != saved.tensors[n].shape)
    if missing or unknown or other:
        raise ValueError(
            f"--ckpt: the weights in {ckpt} do not fit their own configuration: {len(missing)} are missing"
            f" {missing[:3]}, {len(unknown)} are unknown {unknown[:3]}, {len(other)} have another shape {other[:3]}"
        )
    return model
