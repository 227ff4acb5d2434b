"""Runs for the report's tests: an ordinary one, and one whose every text tries to be something else than text."""

from __future__ import annotations

from typing import Any

from callbacks.report.runs import RunData

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "</div></main></body></html>",
    "<!--<script>",
    "{{ 7 * 7 }} {% raw %}",
    "half \ud83d, \x00, \u202e backwards, \u2028",
    "<svg/onload=window.hacked=3>\"'`;alert(1)//",
    "z" * 2**20,
)


def tree(texts: list[str], children: int) -> dict[str, list[Any]]:
    """A root of ten tokens with so many children of five; every second one is good."""
    count = children + 1
    return {
        "parent": [-1] + [0] * children,
        "start": [0] + [10] * children,
        "length": [10] + [5] * children,
        "row": [0, *range(children)],
        "rows": [children] + [1] * children,
        "sequences": [children] + [1] * children,
        "trained": [0] + [5] * children,
        "credit": [None] + [(-1.0) ** i for i in range(children)],
        "reward": [0.5] + [float(i % 2 == 0) for i in range(children)],
        "text": [texts[i % len(texts)] for i in range(count)],
    }


def run(name: str = "toy/now", texts: tuple[str, ...] = ("what is it?", "this", "that"), children: int = 6) -> RunData:
    """Ten steps, two batches, two validations of 20 prompts of which the first solves 4, the second 16."""
    steps = [float(step) for step in range(1, 11)]
    told = {
        kind: {"prompt_id": texts[0], "reward": reward, "above": 0.5, "surprise": 1.0, "finish": texts[-1], "turns": 2,
               "runs": [[text, i % 2 == 1] for i, text in enumerate(texts)]}
        for kind, reward in (("best", 1.0), ("worst", 0.0), ("surprising", 1.0))
    }  # fmt: skip

    def held_out(step: int, solved: int) -> dict[str, Any]:
        replies = {texts[0]: {"reward": float(step > 0), "runs": [[f"{text} at {step}", True] for text in texts]}}
        rewards = {f"q{i}": [float(i < solved)] for i in range(20)}
        return {"step": step, "sets": {texts[-1]: {"solved_at": 1.0, "rewards": rewards, "replies": replies}}}

    found = RunData(name)
    found.series = {
        "reward": (steps, [step / 10 for step in steps]),
        f"reward/{texts[0]}": (steps, [1 - step / 10 for step in steps]),
        "val/accuracy": ([0.0, 10.0], [0.2, 0.8]),
        "staleness": (steps, [1.0] * 10),
        "mismatch_kl": (steps, [1e-9 * step for step in steps]),
        "time/step": (steps, [2.0] * 10),
        "time/wait": (steps, [0.5] * 10),
        "time/tree": (steps, [1.0] * 10),
        "tokens/dense": (steps, [400.0] * 10),
        "tokens/leaf": (steps, [200.0] * 10),
        "tokens/tree": (steps, [100.0] * 10),
    }
    found.batches = [
        {"step": step, "version": step, "credit": "advantage", "groups": 3, "groups_shown": 2, "sequences": children,
         "tree": tree(list(texts), children), "transcripts": told}
        for step in (1, 10)
    ]  # fmt: skip
    found.held_out = [held_out(0, 4), held_out(10, 16)]
    found.coach = [{"step": 3, "advice": [{"finding": texts[0], "remedy": texts[-1]}], "over": []}]
    found.notes = [texts[0]]
    return found
