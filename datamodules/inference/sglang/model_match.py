"""Do servers, weights and the trainer's model belong together? Checked before anything is sent.

SGLang ends when it is given an id outside its vocabulary, ends outputs early in silence when its context is short, and
keeps old values for weights that are missing from an update: so all of it is compared here first.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from app.tree import most_tokens, tower_parameters
from datamodules.inference.export import ExportError, adapter_weights, base_model, checkpoint_shapes
from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.inference.served_config import as_on_the_hub
from datamodules.inference.sglang.client import shown
from datamodules.inference.sglang.experts import FLAG
from datamodules.inference.sglang.server_state import Server, WrongModel
from datamodules.inference.sglang.weights.forms import from_a_run

_log = logging.getLogger(__name__)
_ASK_S = 30.0
# SGLang's "auto" is never float32: a model that is saved in that is served in float16 (Gemma in bfloat16).
_UNRECORDED = ("triton_kernel", "flashinfer_trtllm")
"""Of experts, what SGLang computes without the choice that it would note: zeros are what it says then, the one expert
of a layer that chooses one."""
_HALF = ("auto", "half", "float16", "bfloat16")


class ModelMatch:
    """The trainer's model, as far as servers and updates (with `adapter`, of its adapter alone) must fit it; keeps no
    reference to it. `records`: servers have to say which experts they choose.

    Attributes:
        vocab_size: rows of its embedding.
        positions: most tokens it can attend to, as it does in training.
    """

    def __init__(self, model: PreTrainedModel, adapter: bool = False, records: bool = False) -> None:
        self._records = records
        base = base_model(model)
        self.vocab_size: int = base.get_input_embeddings().num_embeddings
        self.positions: int = most_tokens(base.config)
        self.architecture = type(base).__name__
        self._rounded = base.dtype != torch.float32  # or it was said already that servers round
        self._adapter = adapter
        if adapter:
            self._shapes = {name: tuple(tensor.shape) for name, tensor in adapter_weights(model).items()}
        else:
            self._shapes = checkpoint_shapes(model)
        # Tied tensors have several names, of which a checkpoint has one.
        self._known = set(base.state_dict()) | set(self._shapes)

    async def check(self, server: Server) -> None:
        """Asks a server what it is, and notes its limits in `server`. Warns, once, of servers that compute a float32
        model in half precision.

        Raises:
            WrongModel: it generates from another kind of model, or not at all; for an adapter, from weights of a run.
            ServerError: it does not answer.
        """
        model, info = await asyncio.gather(
            server.client.get("/model_info", _ASK_S), server.client.get("/server_info", _ASK_S)
        )
        label = model.get("weight_version")
        if self._adapter and from_a_run(label):
            raise WrongModel(
                f"{server.client.url} serves weights '{label}', which a run gave it, and not those of the model below"
                " the adapter: start it anew"
            )
        server.below = label if isinstance(label, str) else ""
        named = model.get("architectures") or [self.architecture]
        theirs = named[0] if isinstance(named, list) else named
        if model.get("is_generation", True) is not True or theirs != self.architecture:
            raise WrongModel(
                f"{server.client.url} serves a {shown(theirs)} ({shown(model.get('model_path'))}), the trainer's model"
                f" is a {self.architecture}; start the server with the model that is trained"
            )
        in_bits = info.get("quantization") or _kept_in(model.get("model_path"))
        if in_bits and not self._adapter:
            raise WrongModel(
                f"{server.client.url} keeps its weights in {shown(in_bits)} ({shown(model.get('model_path'))}), and"
                " would take the trainer's whole ones for such: start it with whole weights, as SGLangEngine.launch"
                " does and callbacks.SavePretrained writes them, or train a LoRA and set SGLangEngine.adapters"
            )
        if self._records and info.get("enable_return_routed_experts") is not True:
            raise WrongModel(
                f"{server.client.url} does not say which experts it chooses, and SGLangEngine.record_experts is true;"
                f" start it with {FLAG}"
            )
        if self._records and info.get("enable_hierarchical_cache") is True:
            raise WrongModel(
                f"{server.client.url} keeps keys and values in the host's memory (--enable-hierarchical-cache), and of"
                " those that it takes back it says which experts other tokens were sent to; start it without, or set"
                " SGLangEngine.record_experts to false"
            )
        if self._records and (backend := info.get("moe_runner_backend")) in _UNRECORDED:
            raise WrongModel(
                f"{server.client.url} has its experts chosen inside of a kernel (--moe-runner-backend {backend}, which"
                " it may have settled on by itself), and notes nothing of it: start it with --moe-runner-backend triton"
                " (SGLangEngine.launch.arguments of servers that the run starts), or set SGLangEngine.record_experts to"
                " false"
            )
        dtype = info.get("dtype")
        if dtype in _HALF and not self._rounded:
            self._rounded = True
            _log.warning(
                "%s computes in half precision (--dtype %s), the trained model is in float32: their log-probabilities"
                " differ by rounding, see mismatch_kl; --dtype float32 (of servers that the run starts"
                " SGLangEngine.launch.dtype) would make them equal",
                server.client.url,
                dtype,
            )
        whole = server.client.whole
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
        runs = whole(state, "effective_max_running_requests_per_dp", None, 1) or whole(
            info, "max_running_requests", None, 1
        )
        if runs:
            server.limit = min(server.limit, runs * (whole(info, "dp_size", 1, 1) or 1))
        server.incremental = info.get("incremental_streaming_output") is True
        # Prompts of this length are refused already; a request of this length, output included, is served in full.
        server.max_context = min(self.positions, whole(info, "max_req_input_len", self.positions, 1) or self.positions)

    def check_update(self, update: WeightUpdate) -> None:
        """Raises GenerationError when names or shapes are not those of the model."""
        if update.state_dict is not None:
            field, shapes = "state_dict", {name: tuple(tensor.shape) for name, tensor in update.state_dict.items()}
        else:
            assert update.path is not None
            field, shapes = "path", _shapes_in(Path(update.path), "adapter_config" if self._adapter else "config")
        missing = sorted(name for name in self._shapes if name not in shapes)
        unknown = sorted(name for name in shapes if name not in self._known)
        if missing or unknown:
            raise GenerationError(
                f"WeightUpdate.{field}: does not fit {self.architecture}; missing {missing[:3]} ({len(missing)}),"
                f" unknown {unknown[:3]} ({len(unknown)}); send checkpoint_weights of the model it was started with"
            )
        for name, shape in shapes.items():
            if shape != self._shapes.get(name, shape):
                raise GenerationError(
                    f"WeightUpdate.{field}: '{name}' has shape {shape}, the engine's is {self._shapes[name]};"
                    " send the weights of a model of the same configuration"
                )


def refuse_trained_tower(model: PreTrainedModel) -> None:
    """Raises GenerationError for a model whose tower is trained. SGLang 0.5.21 keeps a picture's features when weights
    are updated, `flush_cache` or not, and would go on with those of the old tower in silence."""
    base = base_model(model)
    tower = {id(parameter) for parameter in tower_parameters(base) if parameter.requires_grad}
    moving = [name for name, parameter in base.base_model.named_parameters() if id(parameter) in tower]
    if moving:
        raise GenerationError(
            f"SGLangEngine.urls: '{moving[0]}' is trained, and servers keep the features that a tower made of a picture"
            " before an update: set model.model.train_tower to false, or generate with EmbeddedEngine"
        )


def refuse_misread(model: PreTrainedModel) -> None:
    """Raises GenerationError for a model that servers would read as another one."""
    try:
        as_on_the_hub(base_model(model).config.to_dict())
    except ExportError as error:
        raise GenerationError(f"SGLangEngine.start: {error}") from error


def _kept_in(path: Any) -> str:
    """In what few bits the weights of a model are published, "" where it has whole ones, or is not on this machine."""
    try:
        config, _ = PretrainedConfig.get_config_dict(str(path), local_files_only=True)
        return str(config["quantization_config"]["quant_method"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _shapes_in(directory: Path, config: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the headers of a directory's safetensors files, beside their configuration."""
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files or not (directory / f"{config}.json").exists():
        raise GenerationError(
            f"WeightUpdate.path: {directory} does not hold {config}.json and *.safetensors; write it with"
            " save_pretrained or WeightFiles"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as content:
                shapes |= {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise GenerationError(f"WeightUpdate.path: {file} cannot be read: {error}") from error
    return shapes
