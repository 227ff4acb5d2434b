"""Makes the servers of a fleet, none of them contacted or started: from addresses, or processes of our own."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from app import checks
from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient
from datamodules.inference.sglang.launcher import ServerOptions, ServerProcess, refused_argument
from datamodules.inference.sglang.server_state import Server

_log = logging.getLogger(__name__)


@dataclass
class Launch:
    """Servers to start on this machine, on free ports of loopback, in the environment that `make sglang` built or that
    ARBORIST_SGLANG_PYTHON names.

    Attributes:
        replicas: how many.
        device: "cuda", "cpu", or "auto": the first that there is.
        dtype: "float32", "bfloat16", "float16" or "auto": on a CPU the model's, on a GPU SGLang's choice, which is the
            model's but for float32: that it serves in half precision.
        kv_cache_tokens: size of each one's key-value cache; null leaves it to SGLang on a GPU and is 65,536 on CPU.
        first_gpu: of the first server; the others follow.
        tensor_parallel: GPUs of one server.
        num_threads: CPU threads of one server; null leaves torch's default.
        in_turns: servers share the GPUs of the ranks that train: while the trainer computes they stand still, without
            memory of the GPU (their weights wait in the host's); while they generate it keeps weights and optimizer
            state alone. Say what they may take with --mem-fraction-static in `arguments`. On a CPU they stand still,
            and free nothing.
        max_restarts: so often in a row a server that ended is started again; then it is given up.
        log_dir: directory of their logs; null for a temporary one, which stays when a server failed.
        arguments: more arguments, as on SGLang's command line; none of --host, --port, --api-key and --config.

    Raises:
        ValueError: a value out of range, or without effect.
    """

    replicas: int = 1
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_tokens: int | None = None
    first_gpu: int = 0
    tensor_parallel: int = 1
    num_threads: int | None = None
    in_turns: bool = False
    max_restarts: int = 5
    log_dir: str | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = ("replicas", "kv_cache_tokens", "tensor_parallel", "num_threads")
        checks.at_least(1, {f"launch.{name}": getattr(self, name) for name in counts})
        checks.at_least(0, {"launch.first_gpu": self.first_gpu, "launch.max_restarts": self.max_restarts})
        checks.one_of("launch.device", self.device, ("auto", "cuda", "cpu"))
        if problem := refused_argument(self.arguments):
            raise ValueError(f"launch.arguments: {problem}")
        if self.chosen_device == "cpu" and (self.first_gpu, self.tensor_parallel) != (0, 1):
            raise ValueError("launch.first_gpu, launch.tensor_parallel: have no effect with launch.device: cpu")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's, of this machine: they have its first GPUs
        if self.in_turns and self.chosen_device == "cuda":
            last = self.first_gpu + self.replicas * self.tensor_parallel
            if last > ranks:
                raise ValueError(
                    f"launch.in_turns: servers would be on GPUs {self.first_gpu} to {last - 1}, and this machine's"
                    f" {ranks} ranks train on 0 to {ranks - 1} only: let fewer servers (launch.replicas) share them, or"
                    " leave launch.in_turns out for servers on GPUs of their own"
                )
        elif self.chosen_device == "cuda" and ranks > 1 and self.first_gpu < ranks:
            raise ValueError(
                f"launch.first_gpu: {self.first_gpu}, and this machine's {ranks} ranks (torchrun's --nproc-per-node)"
                f" train on its GPUs 0 to {ranks - 1}; set it to {ranks} or more, let fewer ranks train, or share them"
                " (launch.in_turns: true)"
            )

    @property
    def chosen_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def options(
        self, model_path: str, context: int | None, label: str | None, seed: int, limit: int | None
    ) -> list[ServerOptions]:
        """How each server runs."""
        return [
            ServerOptions(
                model_path,
                device=self.chosen_device,
                dtype=self.dtype,
                context=context,
                max_running_requests=limit,
                kv_cache_tokens=self.kv_cache_tokens,
                gpu=self.first_gpu + index * self.tensor_parallel,
                tensor_parallel=self.tensor_parallel,
                num_threads=self.num_threads,
                seed=(seed * self.replicas + index) % (1 << 31),
                label=label,
                in_turns=self.in_turns,
                arguments=tuple(self.arguments),
            )
            for index in range(self.replicas)
        ]


def with_adapters(options: ServerOptions, policy: Any, most: int) -> ServerOptions:
    """The same server with the model below the policy's LoRA, taking `most` versions of that.

    Raises:
        GenerationError: the directory of that model is not known.
    """
    config = next(iter(policy.peft_config.values()))
    path = config.base_model_name_or_path
    if not path:
        raise GenerationError(
            "SGLangEngine.adapters: the policy's adapter does not name the model it is on; set model.path to a"
            " directory"
        )
    named = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    modules = sorted({name.rpartition(".")[2] for name in named})
    adapters = ["--enable-lora", "--max-lora-rank", str(config.r), "--lora-target-modules", *modules]
    adapters += ["--max-loras-per-batch", str(most), "--max-loaded-loras", str(most)]
    if options.device == "cpu":
        adapters += ["--lora-backend", "torch_native"]
    return replace(options, model_path=path, label=None, arguments=(*adapters, *options.arguments))


def given_servers(urls: Sequence[str], api_key: str | None, limit: int) -> list[Server]:
    """Servers that somebody else runs. Raises ValueError for an address that is none, or is there twice.

    Warns, once, of a key that would go over a network as it is.
    """
    clients = [ServerClient(url, api_key) for url in urls]
    if open_to_all := [client.url for client in clients if client.exposes_key]:
        _log.warning(
            "the API key, prompts and replies go to %s in clear text: whoever sees the traffic can use the servers; use"
            " https:// addresses or a tunnel",
            ", ".join(open_to_all),
        )
    for client in clients:
        if sum(other.url == client.url for other in clients) > 1:
            raise ValueError(f"urls: {client.url} is there twice; name each server once")
    return [Server(client.url, client, None, limit) for client in clients]


def launched_servers(
    options: Sequence[ServerOptions], log_dir: Path, api_key: str | None, limit: int, belongings: Path
) -> list[Server]:
    """Servers of our own, each with its log file; they remove `belongings` when this process is killed.

    Without a key they get one that nobody else knows: loopback is open to every user of a machine, and whoever reaches
    a server can end it and change its weights.
    """
    key = api_key or secrets.token_urlsafe(24)
    servers = []
    for index, own in enumerate(options):
        process = ServerProcess(own, log_dir / f"server_{index}.log", key, belongings)
        servers.append(Server(f"server {index}", process.client(), process, limit))
    return servers
