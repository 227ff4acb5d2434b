"""Models and tokenizers whose class lies beside them as code: nothing of it runs, and nobody is asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.conversations.chat import load_chat_tokenizer
from datamodules.prompts.tokenizers import load_tokenizer
from modules.models import ModelSource
from modules.models.source import build_model

SAID = "its class is code that lies beside it, and such code is not run"


@pytest.mark.parametrize(
    "read",
    [lambda path: build_model(ModelSource(path=path)), load_tokenizer, load_chat_tokenizer],
    ids=["model", "tokenizer", "chat"],
)
def test_it_is_not_run(read: Callable[[str], object], tmp_path: Path) -> None:
    model = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_its_own", "auto_map": model}))
    tokenizer = {"tokenizer_class": "OfItsOwn", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match=SAID):
        read(str(tmp_path))
    assert not (tmp_path / "ran").exists()
