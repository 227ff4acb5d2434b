"""`arborist export`: a checkpoint's policy loads with transformers and computes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from app.cli import main
from app.cli.export import export
from app.strategies.pieces import load_whole
from datamodules.prompts.tokenizers import load_tokenizer
from tests.app.cli.verbs import export_jobs as jobs
from tests.app.tree.engine.pictures import vision
from tests.helpers.rank_pool import RankPool
from tests.helpers.selection import EXACT_ROUTERS, needs_transformers


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


@pytest.mark.parametrize("adapters", [False, True])
def test_a_reward_model(one_rank: RankPool, tmp_path: Path, adapters: bool) -> None:
    [expected] = one_rank.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=adapters, scores=True)
    export(tmp_path / "step.ckpt", tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    got = model.state_dict()
    assert model.config.num_labels == 1 and got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_projection_that_only_the_configuration_ties(one_rank: RankPool, tmp_path: Path, adapters: bool) -> None:
    """It is written, and the configuration beside it says so."""
    [expected] = one_rank.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=adapters, apart=True)
    export(tmp_path / "step.ckpt", tmp_path / "out")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_tokenizer_that_is_none_is_named_before_anything_is_written(one_rank: RankPool, tmp_path: Path) -> None:
    one_rank.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=False)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"--tokenizer: '.*nothing' holds no tokenizer: "):
        export(tmp_path / "step.ckpt", tmp_path / "deep" / "out", tokenizer=str(tmp_path / "nothing"))
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("tokenizer", ["char:01", "directory", "model directory", "missing", "model missing"])
def test_a_run_is_its_last_checkpoint_and_brings_its_tokenizer(
    one_rank: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    (run / "checkpoints").mkdir(parents=True)
    of_model, tokenizer = tokenizer.startswith("model "), tokenizer.removeprefix("model ")
    if tokenizer == "directory":
        tokenizer = str(tmp_path / "tokenizer")
        load_tokenizer("char:01").save_pretrained(tokenizer)
    named: Any = {"data": {"init_args": {"tokenizer": tokenizer}}}
    if of_model:  # recorded tokens need none
        named = {"data": {"init_args": {}}, "model": {"init_args": {"model": {"path": tokenizer}}}}
    (run / "config.yaml").write_text(yaml.safe_dump(named))
    words = ["export", "--ckpt", str(run), "--out", str(out)]
    with pytest.raises(SystemExit):
        main(words)
    assert f"--ckpt: {run} is a run without a checkpoint" in capsys.readouterr().err
    one_rank.run(jobs.save_language_model, path=run / "checkpoints" / "last.ckpt", adapters=False)
    main(words)
    said = capsys.readouterr().out
    if tokenizer == "missing":
        assert (
            "tokenizer: none, as the run's 'missing' has none here; --tokenizer" in said
            and not (out / "tokenizer.json").exists()
        )
    else:
        assert f"tokenizer: {tokenizer}" in said
        assert AutoTokenizer.from_pretrained(out).encode("01") == load_tokenizer("char:01").encode("01")


@pytest.mark.parametrize("broken", [False, True])
def test_the_image_processor_of_the_run_comes_along(
    one_rank: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: bool
) -> None:
    """Without it nobody could show the model a picture."""
    run, model = tmp_path / "run", tmp_path / "model"
    seeing = vision.make("Qwen3.5")
    seeing.model.config.save_pretrained(model)
    seeing.processor.save_pretrained(model)
    if broken:
        (model / "preprocessor_config.json").write_text("{")
    named = {"data": {"init_args": {"tokenizer": "char:01"}}, "model": {"init_args": {"model": {"path": str(model)}}}}
    one_rank.run(jobs.save_language_model, path=run / "checkpoints" / "last.ckpt", adapters=False)
    (run / "config.yaml").write_text(yaml.safe_dump(named))
    words = ["export", "--ckpt", str(run), "--out", str(tmp_path / "out")]
    if broken:
        with pytest.raises(SystemExit):
            main(words)
        assert f"the image processor in {model} cannot be read" in capsys.readouterr().err
        return
    main(words)
    assert f"image processor: {model}" in capsys.readouterr().out
    written, own = (json.loads((place / "preprocessor_config.json").read_text()) for place in (tmp_path / "out", model))
    assert written == own


_MEASURED = """
import sys
from pathlib import Path
import transformers.models.qwen3.modeling_qwen3
from app.cli import main
from app.cli.export import export
status = Path("/proc/self/status")
def read(field):
    return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(field))
Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
before = read("VmRSS:")
export(Path(sys.argv[1]), Path(sys.argv[2]), shard_bytes=16 << 20)
print(read("VmHWM:") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory as Linux gives it")
@pytest.mark.slow
def test_a_model_larger_than_memory(one_rank: RankPool, tmp_path: Path) -> None:
    """It takes less than half of the model's bytes, in files of 16 MiB."""
    path, out = tmp_path / "step.ckpt", tmp_path / "out"
    [size] = one_rank.run(jobs.save_large_model, path=path)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURED, str(path), str(out)]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 0.5 * size
    got = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = load_whole(path, lambda name: True)
    assert len(list(out.glob("*.safetensors"))) > 10
    assert got.keys() == {name.removeprefix("model/policy.") for name in expected}
    assert all(torch.equal(got[name.removeprefix("model/policy.")], tensor) for name, tensor in expected.items())


class TestOptions:
    @pytest.fixture
    def path(self, two_ranks: RankPool, tmp_path: Path) -> Path:
        two_ranks.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=False)
        return tmp_path / "step.ckpt"

    def test_other_dtype(self, path: Path, tmp_path: Path) -> None:
        export(path, tmp_path / "out", dtype=torch.float32)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32

    @needs_transformers(EXACT_ROUTERS)
    def test_half_precision_leaves_routers_alone(self, one_rank: RankPool, tmp_path: Path) -> None:
        """In the file, too: what transformers computes in float32 is not rounded on the way."""
        [expected] = one_rank.run(jobs.save_routed_model, path=tmp_path / "step.ckpt")
        export(tmp_path / "step.ckpt", tmp_path / "out", dtype=torch.bfloat16)
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        kept = [name for name in got if "mlp.gate.weight" in name or name.endswith("e_score_correction_bias")]
        assert len(kept) == 2 and got.keys() == expected.keys()
        for name, tensor in got.items():
            rounded = expected[name] if name in kept else expected[name].bfloat16()
            assert tensor.dtype == rounded.dtype and torch.equal(tensor, rounded), name

    def test_target_in_use(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--out: .* already holds something"):
            export(path, path)

    def test_no_such_model(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--model: .*'critic'; it holds \['policy'\]"):
            export(path, tmp_path / "out", model="critic")

    def test_no_adapter(self, path: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"--adapter: .* holds a model without one; leave it out"):
            export(path, tmp_path / "out", adapter=True)

    def test_the_adapter_alone(self, one_rank: RankPool, tmp_path: Path) -> None:
        """On the model below it, it makes the model that was trained."""
        [expected] = one_rank.run(jobs.save_language_model, path=tmp_path / "step.ckpt", adapters=True)
        export(tmp_path / "step.ckpt", tmp_path / "out", adapter=True)
        written = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert all("lora_" in name for name in written) and len(written) == 8
        layer = "model.layers.1.self_attn.q_proj"
        a, b = (written[f"base_model.model.{layer}.lora_{one}.weight"] for one in "AB")
        saved = load_whole(tmp_path / "step.ckpt", lambda name: f"{layer}.base_layer" in name)
        scale = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] / 4
        [below] = saved.values()
        again = (below.float() + scale * b.float() @ a.float()).to(below.dtype)
        torch.testing.assert_close(again, expected[f"{layer}.weight"])

    def test_not_a_checkpoint(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["export", "--ckpt", str(tmp_path), "--out", str(tmp_path / "out")])
        said = capsys.readouterr().err
        assert f"error: --ckpt: {tmp_path} is no checkpoint of DTAStrategy" in said and "; name a run, or" in said


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
