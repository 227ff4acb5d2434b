"""What a teacher is shown and asked: log-probabilities of the tokens that the policy sampled, and of those likeliest to
it in their places.

Promises: one request a sequence to a teacher on a server (SGLang's /generate, which scores a prompt and shares prefixes
in its radix cache), and what comes back is checked token by token to be of what was sent; a server that is away or busy
is asked again until the deadline; a teacher that is shown another prompt (hints) scores the same reply behind it, and
one that is shown nothing scores none.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app import checks
from app.batch import TEACHER_PROMPT, BatchError, RolloutBatch
from app.functions import Choice
from app.tree import SoftTargets
from modules.episodes import taking_part
from modules.ranks import TEACHERS_VIEW, likeliest_columns
from modules.step import TreeStep

TAUGHT = "taught"
"""Column of a batch whose teacher sees other prompts: 1 on the tokens of which it was asked."""
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 10.0
_SAID = 300


class TeacherLost(RuntimeError):
    """A teacher's server that gave no log-probabilities; the message says why, and what to do."""


@dataclass(frozen=True)
class TeacherServer:
    """A teacher that an SGLang server serves, in place of a copy of its weights here.

    Attributes:
        url: "http://host:port".
        tokenizer: directory of its tokenizer, which has to number tokens as this run's does.
        key_variable: environment variable with the server's key; one that is not set means none.
        max_concurrent: requests in flight.
        deadline_s: seconds one sequence may take, all attempts and the waits between them included.

    Raises:
        ValueError: an option out of range.
    """

    url: str
    tokenizer: str
    key_variable: str = "ARBORIST_SGLANG_API_KEY"
    max_concurrent: int = 16
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"reference.url: {self.url!r} is no URL; give it as http://host:port")
        if not self.tokenizer:
            raise ValueError("reference.tokenizer: empty; name the directory of the teacher's tokenizer")
        checks.at_least(1, {"reference.max_concurrent": self.max_concurrent})
        checks.deadline({"reference.deadline_s": self.deadline_s})

    def scores(self, batch: RolloutBatch, likeliest: int = 0) -> dict[str, Tensor]:
        """Columns, float32 [T], 0 on tokens that are not trained: `logprobs`, of each given those before it, and those
        of `modules.ranks.likeliest_columns`.

        Raises:
            BatchError: a sequence that was sampled at another temperature than 1, or with pictures.
            TeacherLost: no answer before the deadline, a refusal, or an answer that is none.
        """
        off = (batch.temperatures != 1.0).nonzero()
        if len(off):
            raise BatchError(
                f"RolloutBatch.temperatures: {float(batch.temperatures[int(off[0])]):g}, but a teacher on a server"
                " scores at temperature 1; set the workflow's temperature to 1.0, or load the teacher here"
                " (reference.path)"
            )
        if batch.pictures:
            raise BatchError("RolloutBatch.pictures: a teacher on a server is sent tokens alone; set reference.path")
        masks, sequences = batch.split(batch.loss_mask), batch.sequences()
        chosen = [i for i, mask in enumerate(masks) if bool(mask.any())]
        names = ("logprobs", *likeliest_columns(likeliest))
        found = torch.zeros(len(names), batch.num_tokens, dtype=torch.float32)
        with ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="teacher") as pool:
            firsts = [int(masks[i].nonzero()[0]) for i in chosen]
            counts = [likeliest] * len(chosen)
            asked = pool.map(self._scored, [sequences[i].tolist() for i in chosen], firsts, counts)
            for i, first, rows in zip(chosen, firsts, asked, strict=True):
                begin = int(batch.cu_seqlens[i])
                found[:, begin + first : begin + first + len(rows)] = torch.tensor(rows).t()
        return dict(zip(names, found * batch.loss_mask, strict=True))

    def _scored(self, tokens: list[int], first: int, likeliest: int) -> list[list[float]]:
        """Of each of `tokens[first:]` (first at least 1) its log-probability, then the ids of the likeliest tokens in
        its place and their probabilities."""
        if first < 1:
            raise BatchError(
                "RolloutBatch.loss_mask: the first token of a sequence is trained, and nothing predicts it"
            )
        body = {
            "input_ids": tokens,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            **({"top_logprobs_num": likeliest} if likeliest else {}),
        }
        answer = self._post("/generate", body)
        about = answer.get("meta_info") if isinstance(answer, dict) else None
        found = about.get("input_token_logprobs") if isinstance(about, dict) else None
        wanted = tokens[first:]
        rows = found[-len(wanted) :] if isinstance(found, list) else []
        values = [row[0] for row in rows if isinstance(row, list) and len(row) >= 2 and type(row[0]) in (int, float)]
        if [row[1] for row in rows if isinstance(row, list) and len(row) >= 2] != wanted or len(values) != len(wanted):
            raise TeacherLost(
                f"{self.url}: answers with log-probabilities of {len(values)} tokens where {len(wanted)} were asked"
                " for; the server must be SGLang's, of a version that scores prompts (return_logprob)"
            )
        if not all(math.isfinite(value) for value in values):
            raise TeacherLost(f"{self.url}: a log-probability is not finite; the teacher's weights or dtype are broken")
        best = self._likeliest(about, len(wanted), likeliest) if likeliest else [[]] * len(wanted)
        return [[min(0.0, float(value)), *more] for value, more in zip(values, best, strict=True)]

    def _likeliest(self, about: Any, tokens: int, count: int) -> list[list[float]]:
        found = about.get("input_top_logprobs")
        rows = found[-tokens:] if isinstance(found, list) else []
        pairs = [[one[:2] for one in row if isinstance(one, list) and len(one) >= 2] for row in rows if row]
        kinds = all(type(p) in (int, float) and type(token) is int for row in pairs for p, token in row)
        numbers = kinds and not any(math.isnan(p) for row in pairs for p, _ in row)
        if len(pairs) != tokens or not numbers or any(len(row) != count for row in pairs):
            raise TeacherLost(
                f"{self.url}: gives no {count} likeliest tokens of {tokens} positions (input_top_logprobs), which the"
                " regulariser forward_kl compares with; serve the teacher with SGLang, lower k, or use kl"
            )
        return [[*(float(token) for _, token in row), *(math.exp(min(0.0, p)) for p, _ in row)] for row in pairs]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        ends, wait = time.monotonic() + self.deadline_s, _FIRST_WAIT_S
        causes: dict[str, None] = {}  # different ones: the last attempt's may be the deadline alone
        headers = {"content-type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["authorization"] = f"Bearer {key}"
        while True:
            request = urllib.request.Request(self.url.rstrip("/") + path, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=max(0.1, ends - time.monotonic())) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                said = " ".join(error.read(4 * _SAID).decode("utf-8", "replace").split())[:_SAID]
                why = f"status {error.code}: {said}"
                if error.code < 500 and error.code != 429:
                    raise TeacherLost(f"{self.url}{path} refuses {len(body['input_ids'])} tokens: {why}") from error
            except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, cut short, no JSON
                why = str(error) or type(error).__name__
            causes.pop(why, None)
            causes[why] = None
            if time.monotonic() + wait >= ends:
                raise TeacherLost(
                    f"{self.url}: the teacher gave no log-probabilities within {self.deadline_s:g} s"
                    f" (reference.deadline_s): {'; before that '.join(list(causes)[:-4:-1])}"
                )
            time.sleep(wait)
            wait = min(_LONGEST_WAIT_S, 2 * wait)


def shown(batch: RolloutBatch) -> RolloutBatch | None:
    """The batch as its teacher sees it: each sequence that has a prompt for it (`app.batch.TEACHER_PROMPT`) with that
    in the place of everything before its first trained token. None where no sequence has one. The trained tokens are
    the same in the same order, but for sequences that are not taught: of these the first token is there alone.

    Raises:
        BatchError: such a prompt that is no list of token ids, or pictures.
    """
    if not any(TEACHER_PROMPT in one for one in batch.metadata):
        return None
    if batch.pictures:
        raise BatchError(f"RolloutBatch.metadata: {TEACHER_PROMPT} beside pictures, which it cannot hold; remove hints")
    starts = batch.cu_seqlens[:-1].tolist()
    ends = batch.cu_seqlens[1:].tolist()
    tokens, masks = [], []
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        mask = batch.loss_mask[start:end]
        ids = batch.metadata[i].get(TEACHER_PROMPT)
        if ids == []:
            tokens.append(batch.tokens[start : start + 1])
            masks.append(torch.zeros(1, dtype=torch.bool))
            continue
        if ids is None or not bool(mask.any()):
            tokens.append(batch.tokens[start:end])
            masks.append(mask)
            continue
        if not _are_ids(ids):
            raise BatchError(
                f"RolloutBatch.metadata: {TEACHER_PROMPT} of prompt '{batch.prompt_ids[i]}' must be a list of token"
                " ids, empty for a sequence that is not taught"
            )
        first = int(mask.nonzero()[0])
        tokens.append(torch.cat([torch.tensor(ids), batch.tokens[start + first : end]]))
        masks.append(torch.cat([torch.zeros(len(ids), dtype=torch.bool), mask[first:]]))
    mask = torch.cat(masks)
    behavior = torch.zeros(len(mask), dtype=torch.float32)
    told = taught(batch)
    behavior[mask] = batch.behavior_logprobs[told]
    versions = torch.full((len(mask),), -1)
    versions[mask] = batch.versions[told]
    lengths = torch.tensor([len(one) for one in tokens])
    return RolloutBatch(
        tokens=torch.cat(tokens),
        loss_mask=mask,
        behavior_logprobs=behavior,
        versions=versions,
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        rewards=batch.rewards,
        group_ids=batch.group_ids,
        episode_ids=batch.episode_ids,
        turn_indices=batch.turn_indices,
        temperatures=batch.temperatures,
        prompt_ids=batch.prompt_ids,
        finish_reasons=batch.finish_reasons,
        metadata=batch.metadata,
    )


def _check_taught(by_prompts: bool, reference: object, alone: bool) -> None:
    """Raises BatchError where prompts for a teacher have no reader, or a policy would be taught by itself alone without
    any.

    Args:
        by_prompts: the batch has some. reference: where the teacher comes from. alone: nothing but the teacher is
            followed.
    """
    if by_prompts and reference is None:
        raise BatchError(
            "RolloutBatch.metadata: prompts for a teacher (hints of the workflow), and no reference reads them; set"
            " reference, or remove the workflow's hint"
        )
    if alone and not by_prompts and reference == "initial":
        raise BatchError(
            "RolloutBatch.metadata: advantage=distill with reference 'initial' teaches nothing without hints,"
            " as the teacher reads what the policy reads; set the workflow's hint, or reference.path"
        )


def teach(
    batch: RolloutBatch,
    teacher: Any,
    known: bool,
    advantage: Choice | None,
    likeliest: int,
    outputs: Callable[[RolloutBatch, Mapping[str, Sequence[str]]], Mapping[str, Mapping[str, Tensor]]],
) -> None:
    """Adds what the teacher says to `batch`: the columns `reference` and `modules.ranks.likeliest_columns`; with
    prompts for it TAUGHT, too.

    Args:
        teacher: a `TeacherServer`; None for none; anything else is the engine "reference", which `outputs` runs
            (`modules.ranks.RankWork.outputs`).
        known: the batch has them already, of a teacher that sees what the policy sees.
        advantage: the estimator. likeliest: how many tokens are asked for.
    """
    other = shown(batch)
    alone = advantage is not None and advantage.name == "distill" and not advantage.options.get("task")
    _check_taught(other is not None, teacher, alone)
    if teacher is None or known:
        return
    seen, told, names = batch if other is None else other, taught(batch), ("logprobs", *likeliest_columns(likeliest))
    found: Mapping[str, Tensor] = dict.fromkeys(names, torch.zeros(seen.num_tokens, dtype=torch.float32))
    if bool(told.any()) and isinstance(teacher, TeacherServer):
        found = teacher.scores(seen, likeliest)
    elif bool(told.any()):
        found = outputs(seen, {"reference": names})["reference"]
    for name, values in found.items():
        column = torch.zeros(batch.num_tokens, dtype=torch.float32)
        column[told] = values[seen.loss_mask]
        batch.add_column("reference" if name == "logprobs" else name, column)
    if other is not None:
        batch.add_column(TAUGHT, told)
        if likeliest:
            batch.add_column(TEACHERS_VIEW, views(batch))


def taught(batch: RolloutBatch) -> Tensor:
    """bool [T]: the trained tokens of which the teacher is asked."""
    silent = torch.tensor([one.get(TEACHER_PROMPT) == [] for one in batch.metadata])
    return batch.loss_mask & ~silent.repeat_interleave(batch.lengths())


def share_taught(batch: RolloutBatch) -> tuple[int, int]:
    """How many of the tokens that steps train the teacher is asked of, and how many these are: without those of
    episodes that are left out."""
    own = batch.flat_index(taking_part(batch, list(range(len(batch))), ""))
    return int(taught(batch)[own].sum()), int(batch.loss_mask[own].sum())


def as_taught(columns: Mapping[str, Tensor], own: Tensor) -> Tensor | None:
    """The teacher's log-probabilities, the policy's `own` where it was not asked, so that nothing parts the two; None
    without a teacher."""
    if "reference" not in columns or TAUGHT not in columns:
        return columns.get("reference")
    return torch.where(columns[TAUGHT] > 0, columns["reference"].to(own), own)


def views(batch: RolloutBatch) -> Tensor:
    """float32 [T]: on trained tokens the number of the prompt that the sequence's teacher is shown, 0 where it is the
    policy's own. Sequences of equal tokens and equal numbers are taught the same."""
    numbers: dict[tuple[int, ...], int] = {}
    found = torch.zeros(batch.num_tokens, dtype=torch.float32)
    for row, mask, about in zip(batch.split(found), batch.split(batch.loss_mask), batch.metadata, strict=True):
        ids = about.get(TEACHER_PROMPT)
        if ids is not None and bool(mask.any()):
            prompt = (int(mask.nonzero()[0]), *ids)  # in the place of so many tokens
            row[mask] = float(numbers.setdefault(prompt, len(numbers) + 1))
    return found


def soft_targets(step: TreeStep, names: Sequence[str]) -> SoftTargets:
    """The reference's likeliest tokens, taken out of the step's columns of these `names` (`likeliest_columns`), which
    get what losses read of them: `teacher_soft`, `teacher_mass`."""
    own = [step.columns.pop(name) for name in names if step.batch is not None]
    step.columns.pop(TEACHERS_VIEW, None)  # the tree has been made by it
    both = torch.stack(own, -1) if own else torch.zeros(0, len(names))
    ids, probabilities = both.chunk(2, -1)
    if own:
        step.columns["teacher_soft"] = torch.xlogy(probabilities, probabilities).sum(-1)
        step.columns["teacher_mass"] = probabilities.sum(-1)
    return SoftTargets(ids.long(), probabilities)


def asked(mask: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """bool [T]: the trained tokens of which a teacher was asked; `columns` of a step."""
    return mask & (columns[TAUGHT] > 0).to(mask.device) if TAUGHT in columns else mask


def _are_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(type(one) is int and one >= 0 for one in value)
