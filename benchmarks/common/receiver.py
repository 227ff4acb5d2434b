"""A server that takes weights as SGLang does, over a process group of gloo, and generates nothing.

Promises: what was broadcast is what it has, to the bit; it listens while its `with` lasts.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch import Tensor

from datamodules.inference.sglang.loop_thread import LoopThread

_WAIT = timedelta(seconds=60)
MODEL_INFO = {"architectures": ["Qwen3ForCausalLM"], "is_generation": True, "model_path": "/m"}
SERVER_INFO = {
    "internal_states": [{"effective_max_running_requests_per_dp": 8}],
    "max_running_requests": 8,
    "max_req_input_len": 64,
    "dp_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "device": "cpu",
    "incremental_streaming_output": True,
}


class Receiver:
    """Of one rank, for a Qwen3.

    Args:
        host: it listens at.
        refuse: how many invitations into a group it answers with an error first.
        unreached: how many groups it does not reach, first; it waits and takes nothing else, as SGLang's scheduler.

    Attributes:
        url: of the server, once it listens.
        version: of its weights.
        got: the tensors of the last update that ended, by name.
        joined: ports of the groups it joined, in order.
        free: ends what it is stuck in.
    """

    def __init__(self, host: str = "127.0.0.1", refuse: int = 0, unreached: int = 0) -> None:
        self.url, self.version = "", "0"
        self.got: dict[str, Tensor] = {}
        self.joined: list[int] = []
        self.free = asyncio.Event()
        self._host, self._refuse, self._unreached = host, refuse, unreached
        self._one = asyncio.Lock()
        self._groups: dict[str, Any] = {}
        self._coming: dict[str, Tensor] = {}

    def __enter__(self) -> Receiver:
        self._thread = LoopThread("receiver")
        self._thread.call(self._open(), 10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.loop.call_soon_threadsafe(self.free.set)
        self._thread.call(self._runner.cleanup(), 10.0)
        self._thread.stop(10.0)

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path == "/model_info":
            return web.json_response({**MODEL_INFO, "weight_version": self.version})
        if request.path == "/server_info":
            return web.json_response(SERVER_INFO)
        try:
            async with self._one:
                await self._take(request.path, await request.json() if request.can_read_body else {})
        except Exception as error:  # as a server says it
            return web.json_response({"success": False, "message": str(error)}, status=400)
        return web.json_response({"success": True, "message": ""})

    async def _take(self, path: str, asked: dict[str, Any]) -> None:
        if path == "/init_weights_update_group":
            if self._refuse:
                self._refuse -= 1
                raise RuntimeError("the address is not reached")
            if self._unreached:
                self._unreached -= 1
                await self.free.wait()
                raise RuntimeError("the address is not reached")
            self._groups[asked["group_name"]] = await asyncio.to_thread(_join, asked)
            self.joined.append(asked["master_port"])
        elif path == "/destroy_weights_update_group":
            self._groups.pop(asked["group_name"], None)
        elif path == "/begin_weight_update":
            self._coming = {}
        elif path == "/update_weights_from_distributed":
            self._coming |= await asyncio.to_thread(_receive, asked, self._groups[asked["group_name"]])
            self.version = asked["weight_version"] or self.version
        elif path == "/end_weight_update":
            self.got = self._coming


def _join(asked: dict[str, Any]) -> Any:
    name = asked["group_name"]
    store: Any = dist.TCPStore(asked["master_address"], asked["master_port"], is_master=False, timeout=_WAIT)
    for prefix in (name, f"{name}/", "cpu/"):  # as torch.distributed nests them
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, asked["rank_offset"], asked["world_size"], _WAIT)


def _receive(asked: dict[str, Any], group: Any) -> dict[str, Tensor]:
    parts = list(zip(asked["names"], asked["dtypes"], asked["shapes"], strict=True))
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in parts}
    sizes = [tensor.nbytes for tensor in tensors.values()]
    data = torch.empty(sum(sizes), dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()
    for tensor, piece in zip(tensors.values(), data.split(sizes), strict=True):
        tensor.view(-1).view(torch.uint8).copy_(piece)
    return tensors
