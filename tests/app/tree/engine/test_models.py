"""Model families: exact, or refused with an error that names the layer, the setting or the input. Never silently wrong.

Rows and columns are those of `docs/support_matrix.md`, which has to say what these tests find.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import CONFIG_MAPPING

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.engine import families, support_matrix
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads
from tests.helpers.selection import some

CELLS = [  # quick: every family in float32, and every column of one family
    pytest.param(row, column, marks=[] if column == "float32" or row == "Qwen3" else pytest.mark.slow)
    for row in families.SUPPORTED
    for column in families.COLUMNS
]


QUANTISED = "4 bit"
NEEDS = {"modname": "bitsandbytes", "reason": "4 bit need bitsandbytes: pip install -e '.[qlora]'"}


@pytest.mark.parametrize(("row", "column"), CELLS)
def test_supported_family(row: str, column: str) -> None:
    if column == QUANTISED:
        pytest.importorskip(**NEEDS)
    assert families.cell(row, column) == ("refused" if column in families.SUPPORTED[row].refused else "yes")


@pytest.mark.parametrize("row", some(families.SUPPORTED, families.KINDS))
def test_the_self_check_passes(row: str) -> None:
    """Of which the cells are made without, since each is such a comparison."""
    report = TreeEngine(families.build(families.SUPPORTED[row])).verify(PrefixTree.build(families.SEQUENCES))
    assert report is not None and report.passed, str(report)


@pytest.mark.parametrize("row", families.REFUSED)
def test_refused_family(row: str) -> None:
    words = families.refusal(row)
    model = families.build(families.REFUSED[row])
    assert any(word in words for word in ("layer", type(model).__name__, type(model.base_model).__name__))


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.OTHERS)
def test_other_families(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    family = families.other(kind)
    families.check_float32(family)


@pytest.mark.slow  # every cell
def test_the_support_matrix_is_current() -> None:
    """But the section on pictures, which is compared beside the tests of its cells."""
    pytest.importorskip(**NEEDS)
    found = support_matrix.DOCUMENT.read_text()
    start, end = found.index("\n## With pictures"), found.index("\n\n## Refused by name")
    fresh = support_matrix.markdown(found[start:end].split("\n"))
    assert found == fresh, "run python -m tests.app.tree.engine.support_matrix"


def test_attention_that_sees_ahead_is_refused() -> None:
    """Told by the layers alone; the self-check would tell of it in numbers."""
    model = models.make("gemma3_text", head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match=r"layer 0 \(Gemma3Attention\): is_causal=False"):
        TreeEngine(model, self_check=False).forward(PrefixTree.build(families.SEQUENCES))


def test_a_wrong_family_is_not_called_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards every cell: an engine whose branches see each other fails all columns."""
    from app.tree.planning import layout

    monkeypatch.setattr(layout, "_block", lambda start, stop, *rest: layout.Part(start, stop, start, stop, causal=True))
    for column, check in families.COLUMNS.items():
        if column == QUANTISED and find_spec("bitsandbytes") is None:
            continue
        with pytest.raises(AssertionError):
            check(families.SUPPORTED["Qwen3"])
            pytest.fail(f"{column} did not notice", pytrace=False)


def lora(**options):
    return get_peft_model(families.build(families.SUPPORTED["Qwen3"]), LoraConfig(r=2, **options))


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]])
def test_lora_beside_fully_trained_embeddings(saved: list[str]) -> None:
    model = lora(target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    families.within(families.errors(model))


def test_lora_on_embeddings_and_head() -> None:
    model = lora(target_modules=["embed_tokens", "lm_head", "k_proj"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    families.within(families.errors(model))


def test_lora_with_weight_decomposition() -> None:
    families.within(families.errors(lora(target_modules="all-linear", use_dora=True)))


def test_lora_dropout_is_refused_in_training() -> None:
    model = lora(target_modules=["q_proj"], lora_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"dropout of 0\.1 at '.*q_proj.*'"):
        TreeEngine(model).backward(PrefixTree.build(families.SEQUENCES), lambda out, i: out.logprobs.sum())
    families.within(families.errors(model.eval()))


def test_adapters_that_add_tokens_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"adapter 'default'.*LoRA"):
        TreeEngine(get_peft_model(families.build(families.SUPPORTED["Qwen3"]), config))


def test_long_sequences_beyond_a_window() -> None:
    """Masked blocks and windows at sizes of their own: 700 tokens, a window of 90, float64."""
    random = torch.Generator().manual_seed(0)
    stem = torch.randint(0, 31, (400,), generator=random).numpy()
    sequences = [
        torch.cat([torch.from_numpy(stem[:cut]), torch.randint(0, 31, (n,), generator=random)]).numpy()
        for cut, n in ((400, 300), (400, 20), (400, 150), (180, 200), (180, 5), (60, 10))
    ]
    model = models.make("starcoder2", torch.float64, sliding_window=90, max_position_embeddings=1024)
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss)
    for budgets in ((2000, 4000), (300, 500), (64, 100)):
        TreeEngine(model, *budgets).backward(PrefixTree.build(sequences), loss)
        assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9
