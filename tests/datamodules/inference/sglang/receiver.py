"""A server that takes weights as SGLang does, over a process group of gloo, and generates nothing."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.hostile_server import Answer, HostileServer, http, said

_WAIT = timedelta(seconds=60)


class Receiver(HostileServer):
    """A loopback server of one rank.

    Attributes:
        got: the tensors of the last update that ended, by name.
        joined: ports of the groups it joined, in order.
        refuse: how many invitations into a group it answers with an error first.
    """

    def __init__(self, refuse: int = 0) -> None:
        super().__init__()
        self.act = self._take
        self.got: dict[str, Tensor] = {}
        self.joined: list[int] = []
        self.refuse = refuse
        self._groups: dict[str, Any] = {}
        self._coming: dict[str, Tensor] = {}

    async def _take(self, path: str, body: bytes) -> Answer | None:
        asked = json.loads(body) if body else {}
        try:
            if path == "/init_weights_update_group":
                if self.refuse:
                    self.refuse -= 1
                    raise RuntimeError("the address is not reached")
                self._groups[asked["group_name"]] = await asyncio.to_thread(self._join, asked)
                self.joined.append(asked["master_port"])
            elif path == "/destroy_weights_update_group":
                self._groups.pop(asked["group_name"], None)
            elif path == "/begin_weight_update":
                self._coming = {}
            elif path == "/update_weights_from_distributed":
                await asyncio.to_thread(self._receive, asked)
                self.version = asked["weight_version"] or self.version
            elif path == "/end_weight_update":
                self.got = self._coming
        except Exception as error:  # as a server says it
            return Answer([http(json.dumps({"success": False, "message": str(error)}).encode(), "400 Bad Request")])
        return None if path in ("/model_info", "/server_info") else said({"success": True, "message": ""})

    @staticmethod
    def _join(asked: dict[str, Any]) -> Any:
        name = asked["group_name"]
        store: Any = dist.TCPStore(asked["master_address"], asked["master_port"], is_master=False, timeout=_WAIT)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        return dist.ProcessGroupGloo(store, asked["rank_offset"], asked["world_size"], _WAIT)

    def _receive(self, asked: dict[str, Any]) -> None:
        parts = list(zip(asked["names"], asked["dtypes"], asked["shapes"], strict=True))
        empty = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in parts}
        data = torch.empty(sum(tensor.nbytes for tensor in empty.values()), dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._groups[asked["group_name"]].broadcast([data], options).wait()
        for tensor, piece in zip(empty.values(), data.split([tensor.nbytes for tensor in empty.values()]), strict=True):
            tensor.view(-1).view(torch.uint8).copy_(piece)
        self._coming |= empty
