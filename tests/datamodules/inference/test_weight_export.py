"""What engines are given: merged adapters by the base model's names, and directories that are complete or not there."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.cli.runs.run_directory import disk_trouble
from app.strategies.shards import without_storage
from datamodules.inference.embedded.weights import copy_of
from datamodules.inference.export import (
    ExportError,
    WeightParts,
    adapter_weights,
    base_model,
    checkpoint_shapes,
    checkpoint_weights,
    merged_weights,
    num_bytes,
    weight_parts,
)
from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.model_match import refuse_misread
from datamodules.inference.sglang.weights.forms import HostWeights
from datamodules.inference.weight_files import WeightFiles, save_adapter, save_model, split
from tests.app.tree.engine import families
from tests.app.tree.states import hybrids
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import VOCABULARY, tiny_policy

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]])
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.15,
}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(TOKENS).logits


@torch.no_grad()
def assert_loads(path: Path, policy) -> None:
    """transformers reads from `path` the model that `policy` is, nothing missing and nothing left over."""
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(loaded.eval()), logits(policy), atol=2e-5, rtol=0)


def assert_parts_are_the_whole(policy) -> None:
    """What is exported a layer at a time, through a model without storage, is what is exported at once."""
    state, asked = base_model(policy).state_dict(), []

    def fetch(names):
        asked.append(list(names))
        return {name: state[name].detach().clone() for name in names}

    like, whole, found = without_storage(policy), checkpoint_weights(policy), {}
    for part in WeightParts(policy, fetch, like).saved():
        assert not found.keys() & part.keys()
        assert len({re.sub(r"\D+", " ", name).split(" ")[1] for name in part}) == 1  # of one layer
        found |= part
        assert all(parameter.is_meta for parameter in like.parameters())
    assert asked == weight_parts(policy)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == checkpoint_shapes(policy)
    engines = copy_of(without_storage(policy), None, "cpu", WeightParts(policy, fetch, like)).state_dict()
    assert all(torch.equal(engines[name], tensor) for name, tensor in merged_weights(policy).items())


def test_a_plain_policy_is_not_copied() -> None:
    policy = tiny_policy()
    weights = merged_weights(policy)
    assert {name: tensor.data_ptr() for name, tensor in weights.items()} == {
        name: tensor.data_ptr() for name, tensor in policy.state_dict().items()
    }
    assert not any(tensor.requires_grad for tensor in weights.values())
    assert num_bytes(weights) == sum(parameter.nbytes for parameter in policy.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1, 5]},
    ],
    ids=["lora", "rslora-everywhere", "dora", "modules-to-save", "tokens"],
)
def test_adapters_are_merged_without_a_trace_in_the_trainer(options, tmp_path) -> None:
    policy = with_lora(tiny_policy(), **options)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modules_to_save" in name or "trainable_tokens" in name:
                parameter.add_(0.3)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    torch.manual_seed(1)
    generator = torch.get_rng_state()
    weights = merged_weights(policy)
    plain = tiny_policy(seed=5)
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    assert (logits(plain) - logits(tiny_policy())).abs().max() > 0.1  # the adapters do something
    torch.testing.assert_close(logits(plain), logits(policy), atol=2e-5, rtol=0)
    assert checkpoint_weights(policy).keys() == plain.state_dict().keys() - {"lm_head.weight"}
    path, _ = WeightFiles(tmp_path).write(policy, 1)
    assert_loads(path, policy)
    assert_parts_are_the_whole(policy)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_tied_embeddings_that_adapters_separate_are_refused(options) -> None:
    policy = with_lora(tiny_policy(), **options)
    for export in (merged_weights, assert_parts_are_the_whole):
        with pytest.raises(
            ExportError, match=r"lm_head.weight.*embed_tokens.weight.*arborist export --adapter.*tie_word_emb"
        ):
            export(policy)


def test_untied_embeddings_may_have_adapters(tmp_path) -> None:
    torch.manual_seed(0)
    policy = with_lora(Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)), modules_to_save=["lm_head"])
    with torch.no_grad():
        policy.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    assert "lm_head.weight" in checkpoint_weights(policy)
    assert_parts_are_the_whole(policy)
    assert_loads(WeightFiles(tmp_path).write(policy, 1)[0], policy)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_projection_that_only_the_configuration_ties(adapters: bool, tmp_path) -> None:
    """transformers reads files with two tensors as they are; so are they written, and taken by an engine."""
    policy = tiny_policy()
    policy.lm_head.weight = torch.nn.Parameter(-policy.lm_head.weight.detach())
    policy = with_lora(policy) if adapters else policy
    assert base_model(policy).config.tie_word_embeddings
    assert_parts_are_the_whole(policy)
    assert_loads(WeightFiles(tmp_path).write(policy, 1)[0], policy)
    engines = copy_of(policy, None, None).state_dict()
    assert all(torch.equal(engines[name], tensor) for name, tensor in merged_weights(policy).items())


def test_adapters_that_peft_cannot_merge_are_named() -> None:
    policy = with_lora(tiny_policy(), lora_bias=True, target_modules=["down_proj"])
    for export in (merged_weights, assert_parts_are_the_whole):
        with pytest.raises(ExportError, match=r"layers\.0\.mlp\.down_proj' cannot be merged.*bias.*model\.adapter"):
            export(policy)


@pytest.mark.parametrize("adapter", [False, True])
def test_servers_of_other_users_may_read_what_is_written(adapter: bool, tmp_path) -> None:
    policy = with_lora(tiny_policy())
    save_model(policy, tmp_path) if not adapter else save_adapter(policy, tmp_path)
    other = tmp_path / "other"
    other.touch()
    assert {path.stat().st_mode for path in tmp_path.glob("*.safetensors")} == {other.stat().st_mode}


@pytest.mark.parametrize("began", ["pissa", "olora", "gaussian"])
def test_servers_are_sent_no_adapter_that_moved_the_weights_below_it(began: str) -> None:
    """They have these as they were loaded."""
    policy = with_lora(tiny_policy(), init_lora_weights=began)
    if began == "gaussian":
        assert adapter_weights(policy)
    else:
        with pytest.raises(ExportError, match=r"would ignore its init_lora_weights.*SGLangEngine.adapters to null"):
            adapter_weights(policy)


def test_adapters_that_are_not_finite_are_named() -> None:
    policy = with_lora(tiny_policy())
    with torch.no_grad():
        policy.get_base_model().model.layers[1].mlp.down_proj.lora_A["default"].weight[0, 0] = torch.nan
    with pytest.raises(ExportError, match=r"adapters of 'model.layers.1.mlp.down_proj' cannot be merged"):
        merged_weights(policy)


def test_experts_leave_under_the_names_of_a_checkpoint(tmp_path) -> None:
    """transformers fuses them in memory; servers read one tensor for each."""
    torch.manual_seed(0)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    policy = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts)).eval()
    weights = checkpoint_weights(policy)
    assert weights["model.layers.1.mlp.experts.2.down_proj.weight"].shape == (32, 16)
    policy.save_pretrained(tmp_path / "reference")
    (reference,) = (tmp_path / "reference").glob("*.safetensors")
    ours, size = WeightFiles(tmp_path).write(policy, 1)
    assert size == num_bytes(weights) and abs(reference.stat().st_size - size) < 100_000
    assert_loads(ours, policy)
    assert_parts_are_the_whole(policy)
    adapted = with_lora(policy, target_modules=["q_proj"])
    assert checkpoint_weights(adapted).keys() == weights.keys()
    assert_parts_are_the_whole(adapted)


DEEPSEEK_V4 = {"model.embed_tokens.weight": "embed.weight"}
DEEPSEEK_V4 |= {f"model.hc_head.hc_{part}": f"hc_head_{part}" for part in ("fn", "base", "scale")}
"""Names that transformers does not give back as the hub has them."""


@pytest.mark.parametrize("name", hybrids.OPTIONS)
def test_a_hybrid_leaves_as_transformers_itself_saves_it(name: str, tmp_path) -> None:
    """The same names, shapes and values in the files, and the same model when they are read again; but for a layer of
    Kimi Linear without experts and some parts of DeepSeek-V4, whose names on the hub transformers loses."""
    policy = hybrids.make(name).eval()
    assert_parts_are_the_whole(policy)
    policy.save_pretrained(tmp_path / "reference")
    save_model(policy, tmp_path / "saved")
    ours, _ = WeightFiles(tmp_path).write(policy, 1)
    written, saved, expected = (
        {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
        for folder in (ours, tmp_path / "saved", tmp_path / "reference")
    )
    configurations = [json.loads((folder / "config.json").read_text()) for folder in (ours, tmp_path / "saved")]
    assert configurations[0] == configurations[1]
    if name == "kimi_linear":
        kept = ".layers.0.block_sparse_moe."
        expected = {key.replace(kept, ".layers.0.mlp."): tensor for key, tensor in expected.items()}
        assert sum(".mlp." in key for key in expected) == 3
    if name == "deepseek_v4":
        expected = {DEEPSEEK_V4.get(key, key.removeprefix("model.")): tensor for key, tensor in expected.items()}
        kept = re.compile(r"(layers\.\d+\.attn)\.norm\.")
        expected = {kept.sub(r"\1.kv_norm.", key): tensor for key, tensor in expected.items()}
        assert sum(".kv_norm." in key for key in expected) == 3 and "norm.weight" in expected
    assert written.keys() == saved.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    loaded, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert type(loaded) is type(policy)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    again, before = (logits(model).log_softmax(-1) for model in (loaded.eval(), policy))
    torch.testing.assert_close(again, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [row for row in families.SUPPORTED if row.startswith("Gemma 4")])
def test_gemma_4_leaves_with_the_names_that_its_heads_have_on_the_hub(row: str, tmp_path) -> None:
    """Servers know the width and number of heads without a window by them, or take 512."""
    policy = families.build(families.SUPPORTED[row])
    assert_parts_are_the_whole(policy)
    ours, _ = WeightFiles(tmp_path).write(policy, 1)
    written = json.loads((ours / "config.json").read_text())
    heads = policy.config.per_layer_config[1]
    assert written["global_head_dim"] == heads.head_dim == 8
    assert written["num_global_key_value_heads"] == heads.num_key_value_heads
    loaded, info = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits(loaded.eval()), logits(policy), rtol=1e-6, atol=1e-6)
    del written["per_layer_config"]  # as on the hub
    (ours / "config.json").write_text(json.dumps(written))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(ours).eval()), logits(policy))


def test_an_order_of_layers_that_servers_cannot_be_told_is_refused(tmp_path) -> None:
    """They would build other layers in its place, or none; nor is a model that they read otherwise."""
    layers = {"layer_types": ["full_attention", "linear_attention", "linear_attention"]}
    for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        with pytest.raises(ExportError, match=rf"layers \[1\] of 3 attend \(layer_types\).* {name} model"):
            WeightFiles(tmp_path).write(hybrids.make(name, **layers), 1)
    dense_last = hybrids.make("kimi_linear", mlp_layer_types=["dense", "sparse", "dense"])
    with pytest.raises(ExportError, match=r"without experts follows one with them \(mlp_layer_types\)"):
        WeightFiles(tmp_path).write(dense_last, 1)
    with pytest.raises(ExportError, match=r"keys of a Llama4ForCausalLM otherwise.*embedded engine"):
        WeightFiles(tmp_path).write(families.build(families.SUPPORTED["Llama 4"]), 1)
    with pytest.raises(GenerationError, match=r"SGLangEngine.start: .*keys of a Llama4ForCausalLM otherwise"):
        refuse_misread(families.build(families.SUPPORTED["Llama 4"]))
    assert not list(tmp_path.iterdir())


def test_a_policy_that_is_not_its_configuration_is_refused() -> None:
    policy = tiny_policy()
    policy.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ExportError, match=r"not the Qwen3ForCausalLM.*unknown \['extra.bias', 'extra.weight'\]"):
        checkpoint_weights(policy)


def test_files_are_sharded_and_replaced_and_pruned(tmp_path) -> None:
    files = WeightFiles(tmp_path / "weights", shard_bytes=20_000)
    for version in (1, 2, 2):
        policy = tiny_policy(seed=version)
        path, _ = files.write(policy, version)
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) == len(list(path.glob("*.safetensors"))) > 3
        assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        assert_loads(path, policy)
    (tmp_path / "weights" / ".v00000009.partial").mkdir()  # a writer was killed
    files.prune(keep=2)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v00000002"]


def test_parameters_in_one_flat_buffer_do_not_count_as_shared(tmp_path) -> None:
    policy = tiny_policy()
    sizes = [parameter.numel() for parameter in policy.parameters()]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in policy.parameters()])
    for parameter, piece in zip(policy.parameters(), flat.split(sizes)):
        parameter.data = piece.view(parameter.shape)
    assert num_bytes(merged_weights(policy)) == flat.nbytes
    path, _ = WeightFiles(tmp_path).write(policy, 1)
    assert_loads(path, tiny_policy())


def test_weights_in_files_are_sent_as_those_in_memory(tmp_path) -> None:
    """In buckets of their own, one in memory at a time; a file that is gone is named."""
    policy = tiny_policy()
    path, size = WeightFiles(tmp_path, shard_bytes=20_000).write(policy, 1)

    def tensors(weights: HostWeights) -> dict[str, bytes]:
        found = {}
        for bucket in weights.buckets:
            ends = np.cumsum([4 * np.prod(shape) for shape in bucket.shapes]).tolist()
            parts = np.split(bucket.read().numpy(), ends[:-1])
            found |= {name: part.tobytes() for name, part in zip(bucket.names, parts, strict=True)}
        return found

    ours, theirs = HostWeights.in_files(path, 1, 15_000), HostWeights.copy_of(checkpoint_weights(policy), 1, 15_000)
    assert ours.nbytes == theirs.nbytes == size
    assert all(
        bucket.data is None and (len(bucket.names) == 1 or bucket.read().nbytes <= 15_000) for bucket in ours.buckets
    )
    assert tensors(ours) == tensors(theirs)
    files = sorted(path.glob("*.safetensors"))
    files[0].unlink()
    with pytest.raises(GenerationError, match=rf"{files[0]} cannot be read"):
        tensors(ours)


def test_a_model_that_does_not_fit_beside_the_trainer_is_refused() -> None:
    with torch.device("meta"):
        policy = Qwen2ForCausalLM(Qwen2Config(**SMALL | {"intermediate_size": 1 << 36}))
    with pytest.raises(GenerationError, match=r"its own copy .* takes [\d.]+ GB, and [\d.]+ GB are free on cpu; set"):
        copy_of(policy, None, "cpu")


def test_split_cuts_before_the_limit() -> None:
    sizes = {"empty": 0, "a": 3, "b": 5, "huge": 40, "c": 8, "d": 1}
    weights = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert split(weights, 8) == [["empty", "a", "b"], ["huge"], ["c"], ["d"]]


class TestDiskFull:
    """The versions before stay as they are, nothing half-written is left, and the error says where and how much."""

    def assert_refused(self, files: WeightFiles, match: str) -> None:
        with pytest.raises(ExportError, match=rf"version 2 .*{files.path(2)}, which needs [\d,]+ bytes.*{match}"):
            files.write(tiny_policy(seed=2), 2)
        assert [path.name for path in files.directory.iterdir()] == ["v00000001"]
        assert_loads(files.path(1), tiny_policy(seed=1))

    def test_known_beforehand(self, tmp_path) -> None:
        """On a file system too small for two versions."""
        mount = tmp_path / "disk"
        mount.mkdir()
        size = (num_bytes(checkpoint_weights(tiny_policy())) * 3) // 2 + (1 << 20)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", mount], capture_output=True)
        if done.returncode:
            pytest.skip(f"no right to mount a small file system: {done.stderr.decode().strip()}")
        try:
            files = WeightFiles(mount)
            files.write(tiny_policy(seed=1), 1)
            self.assert_refused(files, r"only [\d,]+ bytes are free")
        finally:
            subprocess.run(["umount", mount], check=True)

    def test_in_mid_write(self, tmp_path) -> None:
        """A limit on file sizes makes the kernel refuse bytes in the middle of a file, as a quota does."""
        files = WeightFiles(tmp_path)
        files.write(tiny_policy(seed=1), 1)
        with files_of_at_most(50_000):
            self.assert_refused(files, "(File too large|os error 27)")

    def test_of_a_model_beside_a_run(self, tmp_path) -> None:
        """The command line tells it in a line, as it tells what a disk says of any other file."""
        with files_of_at_most(50_000), pytest.raises(OSError) as caught:
            save_model(tiny_policy(), tmp_path)
        assert caught.value.filename == str(tmp_path / "model-00001-of-00000.safetensors")
        assert str(disk_trouble(caught.value)).endswith("File too large; raise the limit on file sizes (ulimit -f)")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


_WRITER = """
import os, signal, sys
from datamodules.inference import weight_files
from tests.datamodules.inference.engine_suite import tiny_policy
def die(path):
    os.kill(os.getpid(), signal.SIGKILL)
files = weight_files.WeightFiles(sys.argv[1])
files.write(tiny_policy(seed=1), 1)
weight_files._flush = die  # the tensors are written, the directory is not yet renamed
files.write(tiny_policy(seed=2), 2)
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_no_directory_that_looks_complete(tmp_path) -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", _WRITER, str(tmp_path)], env=environment, timeout=500)
    assert done.returncode == -signal.SIGKILL
    files = WeightFiles(tmp_path)
    assert files.path(1).exists() and not files.path(2).exists()
    files.write(tiny_policy(seed=3), 2)
    files.prune(keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["v00000002"]
    assert_loads(files.path(2), tiny_policy(seed=3))


def test_the_base_model_of_either() -> None:
    policy = tiny_policy()
    assert base_model(policy) is policy and base_model(with_lora(policy)) is policy
