"""Data and model of sums of three numbers: worked answers to imitate, and more sums to learn by reward.

Promises: `python -m examples.sft_then_grpo.prepare DIR` leaves DIR/model (see `examples.smollm2.prepare`; one that is
there stays), DIR/worked.jsonl (questions with an answer that goes in two steps), DIR/train.jsonl and DIR/held_out.jsonl
(questions with the sum alone); no question is in two of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.smollm2.prepare import prepare

WORKED = 480
TRAIN = 4000
HELD_OUT = 128


def write_sums(directory: Path) -> None:
    rng = random.Random(0)
    asked: dict[tuple[int, ...], None] = {}  # keeps order
    while len(asked) < WORKED + TRAIN + HELD_OUT:
        asked[tuple(rng.randint(10, 99) for _ in range(3))] = None
    questions = iter(asked)
    for name, count in (("worked", WORKED), ("train", TRAIN), ("held_out", HELD_OUT)):
        lines = []
        for _ in range(count):
            one, two, three = next(questions)
            part, total = one + two, one + two + three
            record: dict[str, object] = {"question": f"What is {one} + {two} + {three}?"}
            if name == "worked":
                record["worked"] = f"{one} + {two} = {part}, {part} + {three} = {total}"
            else:
                record["answer"] = total
            lines.append(json.dumps(record) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    prepare(write_sums)
