"""Which server a request goes to: where its prefix is cached, unless that server is busier than the cache is worth.

A server keeps keys and values of what it has seen, so a prompt that begins like an earlier one is cheap there and costs
its whole prefill elsewhere. The choice minimises

    prompt tokens the server has not seen + load_tokens * requests it runs

Promises: pure bookkeeping, no clocks and no I/O: the same calls give the same choices; memory is bounded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

_Server = TypeVar("_Server", bound=Hashable)
_BLOCK = 64  # tokens; prefixes are compared at multiples of it and at the ends of prompts


class PrefixRouter:
    """Chooses servers and remembers what went where.

    Args:
        load_tokens: tokens of prefill that weigh as much as one more running request. Low values spread requests
            evenly, high ones keep shared prefixes together.
        memory: most prefixes remembered, 64 tokens apart; the least recently used are forgotten first.
    """

    def __init__(self, load_tokens: int = 256, memory: int = 1 << 18) -> None:
        if load_tokens < 1:
            raise ValueError(f"load_tokens: {load_tokens}, must be at least 1")
        self._load_tokens = load_tokens
        self._memory = memory
        self._seen: OrderedDict[bytes, set[Hashable]] = OrderedDict()  # prefix -> servers that have it

    def choose(self, tokens: Sequence[int], running: Mapping[_Server, int]) -> _Server:
        """One of the servers in `running` (server -> requests it runs, at least one server), remembered as having it.

        Ties go to the server with fewer requests, then to the one that comes first.
        """
        prefixes = list(_prefixes(tokens))
        cached = self._cached(prefixes, running)
        chosen = min(
            running, key=lambda one: (len(tokens) - cached[one] + self._load_tokens * running[one], running[one])
        )
        for _, prefix in prefixes:
            self._seen.setdefault(prefix, set()).add(chosen)
            self._seen.move_to_end(prefix)
        while len(self._seen) > self._memory:
            self._seen.popitem(last=False)
        return chosen

    def forget(self, server: Hashable | None = None) -> None:
        """The caches of one server, or of all, are empty now."""
        if server is None:
            self._seen.clear()
            return
        for prefix in [prefix for prefix, servers in self._seen.items() if server in servers]:
            self._seen[prefix].discard(server)
            if not self._seen[prefix]:
                del self._seen[prefix]

    def _cached(self, prefixes: list[tuple[int, bytes]], running: Mapping[_Server, int]) -> dict[_Server, int]:
        """Length of the longest remembered prefix, for each server."""
        cached = dict.fromkeys(running, 0)
        for length, prefix in prefixes:
            having = self._seen.get(prefix, ())
            cached.update({server: length for server in running if server in having})
        return cached


def _prefixes(tokens: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """(length, digest) of the prefixes that are compared, shortest first."""
    content = memoryview(array("q", tokens)).cast("B")
    digest = hashlib.blake2b(digest_size=16)
    for start in range(0, len(tokens), _BLOCK):
        stop = min(start + _BLOCK, len(tokens))
        digest.update(content[8 * start : 8 * stop])
        yield stop, digest.digest()
