"""`arborist export`: a checkpoint's policy loads with transformers and computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.cli.export import export
from tests.app.cli.verbs import export_jobs as jobs
from tests.helpers.rank_pool import RankPool


@pytest.mark.parametrize("adapters", [False, True])
def test_what_two_ranks_saved(two_ranks: RankPool, tmp_path: Path, adapters: bool) -> None:
    path, out = tmp_path / "step.ckpt", tmp_path / "deep" / "model"
    expected = two_ranks.run(jobs.save_language_model, path=path, adapters=adapters)[0]
    export(path, out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and model.generation_config.temperature == 0.7
    got = model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert sorted(path.name for path in out.parent.iterdir()) == ["model"]


class TestOptions:
    @pytest.fixture
    def path(self, two_ranks: RankPool, tmp_path: Path) -> Path:
        two_ranks.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=False)
        return tmp_path / "step.ckpt"

    def test_other_dtype(self, path: Path, tmp_path: Path) -> None:
        export(path, tmp_path / "out", dtype=torch.float32)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32

    def test_target_in_use(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--out: .* already holds something"):
            export(path, path)

    def test_no_such_model(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--model: .*'critic'; it holds \['policy'\]"):
            export(path, tmp_path / "out", model="critic")

    def test_no_adapter(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--adapter: .* holds a model without one; leave it out"):
            export(path, tmp_path / "out", adapter=True)

    def test_not_a_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=rf"--ckpt: {tmp_path} is no checkpoint of DTAStrategy"):
            export(tmp_path, tmp_path / "out")


class TestSomebodyElsesCheckpoint:
    """What it holds is data: no file is written that it names, no code runs."""

    @pytest.mark.parametrize("name", ["../escaped", "{directory}/escaped", "escaped.py", ""])
    def test_names_no_file(self, one_rank: RankPool, tmp_path: Path, name: str) -> None:
        path, out = tmp_path / "step.ckpt", tmp_path / "out"
        smuggled = {name.format(directory=tmp_path): "text"}
        one_rank.run(jobs.save_language_model, path=path, adapters=False, smuggled=smuggled)
        with pytest.raises(ValueError, match=r"--ckpt: .* only config.json, generation_config.json, adapter_config"):
            export(path, out)
        assert {found.name for found in tmp_path.iterdir()} == {"step.ckpt"}

    def test_names_no_kernel_of_the_hub(self, one_rank: RankPool, tmp_path: Path) -> None:
        fields = {"attn_implementation": "somebody/kernel"}
        one_rank.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=False, fields=fields)
        export(tmp_path / "step.ckpt", tmp_path / "out")  # asked for it would be downloaded, or refused
        assert (tmp_path / "out" / "model.safetensors").is_file()
