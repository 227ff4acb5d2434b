"""The experts of one episode's tokens, which its sequences share.

Promises: what an earlier request of the episode has told of the beginning of a prompt is not asked for again, nor held
twice; a token keeps what was first said of it. Prompts with other pictures begin otherwise from the first of these on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from app.routes import Routes, RouteTable
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse

Ints = npt.NDArray[np.int64]


class EpisodeRoutes:
    """Of one episode: `begin` before a request, `end` behind its response."""

    def __init__(self) -> None:
        self._table = RouteTable()
        self._known: list[tuple[Ints, Ints]] = []  # tokens of prompts with their replies, and the row of each, or -1
        self._pictures: dict[bytes, int] = {}  # by their keys

    def begin(self, request: GenerationRequest) -> Ints:
        """Makes the request ask for the experts of tokens that are not known; the rows of those that are."""
        best = np.zeros(0, np.int64)
        prompt = self._named(request)
        for tokens, rows in self._known:
            size = min(len(tokens), len(prompt))
            same = np.append(tokens[:size] == prompt[:size], False) & np.append(rows[:size] >= 0, False)
            if (common := int(same.argmin())) > len(best):
                best = rows[:common]
        request.experts_from = len(best)
        return best

    def end(self, request: GenerationRequest, response: GenerationResponse, known: Ints) -> None:
        """Fills in the response's `routes`. Raises GenerationError: the engine told of no token, or of too many."""
        experts, total = response.experts, len(request.tokens) + len(response.tokens)
        most = total - 1 - len(known)
        if experts is None or len(experts) > most:
            told = "no experts" if experts is None else f"experts of {len(experts)} tokens"
            raise GenerationError(
                f"request '{request.request_id}': the engine told {told}, where {most} were asked for"
            )
        rows = np.full(total, -1, np.int64)
        rows[: len(known)] = known
        rows[len(known) : len(known) + len(experts)] = self._table.add(experts) + np.arange(len(experts))
        response.routes, response.experts = Routes(torch.from_numpy(rows).to(torch.int32), self._table), None
        tokens = np.append(self._named(request), np.array(response.tokens, np.int64))
        beyond = [one for one in self._known if not np.array_equal(one[0], tokens[: len(one[0])])]
        self._known = [*beyond, (tokens, rows)]

    def _named(self, request: GenerationRequest) -> Ints:
        """The tokens of a prompt; those of pictures as numbers below 0, one a picture."""
        tokens = np.array(request.tokens, np.int64)
        for k, picture in enumerate(request.pictures):
            number = self._pictures.setdefault(picture.key, len(self._pictures))
            tokens[np.array(request.images) == k] = -1 - number
        return tokens
