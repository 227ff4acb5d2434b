"""Weights that are published in few bits are trained as what they stand for, computed here from the formats' papers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from modules.models import ModelSource
from modules.models.source import build_model
from tests.app.tree.models import make

# Of OCP Microscaling (2023): E2M1, the sign first; 32 of them share a power of two (E8M0, biased by 127).
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BLOCK = 128  # of DeepSeek-V3 (2412.19437): rows and columns of an FP8 matrix with one scale


def mxfp4(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What GPT-OSS publishes of experts [experts, in, out], two values a byte, and what it stands for."""
    kept, meant = {}, {}
    for name, weight in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            kept[name] = meant[name] = weight
            continue
        experts, columns, rows = weight.shape
        codes = torch.randint(16, (experts, rows, columns // 32, 32))
        powers = torch.randint(118, 123, (experts, rows, columns // 32))
        kept[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        kept[f"{name}_scales"] = powers.to(torch.uint8)
        values = E2M1[codes] * torch.exp2(powers - 127.0)[..., None]
        meant[name] = values.reshape(experts, rows, columns).transpose(1, 2).contiguous()
    return kept, meant


def fp8(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What DeepSeek, Qwen, MiniMax and Mistral publish of linear layers, and what it stands for."""
    kept, meant = {}, {}
    for name, weight in weights.items():
        if not re.search(r"proj|\.w[13]\.", name):  # of MiniMax, one of three matrices is whole
            kept[name] = meant[name] = weight
            continue
        rows, columns = weight.shape
        more = (0, -columns % BLOCK, 0, -rows % BLOCK)  # the last blocks are cut
        blocks = pad(weight.float(), more)
        across, down = blocks.shape[1] // BLOCK, blocks.shape[0] // BLOCK
        blocks = blocks.reshape(down, BLOCK, across, BLOCK)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        narrow = (blocks / scales).to(torch.float8_e4m3fn)

        def cut(whole: Tensor, rows: int = rows, columns: int = columns) -> Tensor:
            return whole.reshape(-1, whole.shape[2] * BLOCK)[:rows, :columns].contiguous()

        kept[name] = cut(narrow)
        kept[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
        meant[name] = cut(narrow.float() * scales)
    return kept, meant


WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 128}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 128}
LATENT |= {"first_k_dense_replace": 1}
CASES = {
    "gpt_oss": (mxfp4, {"quant_method": "mxfp4"}, {"intermediate_size": 32, "hidden_size": 64, "head_dim": 16, **FEW}),
    "qwen3": (fp8, FP8, WIDE),
    "qwen3_moe": (fp8, FP8, {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    "minimax_m2": (fp8, FP8, {**WIDE, **FEW}),
    # As it is published, kv_a_proj_with_mqa has 512 + 64 rows: five blocks, the last one cut; here two.
    "deepseek_v3": (fp8, FP8, {**WIDE, **LATENT, "kv_lora_rank": 128}),
    "deepseek_v3_published": (fp8, FP8, {**WIDE, **LATENT, "kv_lora_rank": 512}),
}


@pytest.mark.parametrize("family", CASES)
def test_they_are_read_back(family: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")  # transformers wants it for FP8
    writes, quantization, sizes = CASES[family]
    torch.manual_seed(0)
    model: PreTrainedModel = make(family.removesuffix("_published"), attn_implementation="eager", **sizes).bfloat16()
    model.save_pretrained(tmp_path)
    kept, meant = writes(load_file(tmp_path / "model.safetensors"))
    shutil.copytree(tmp_path, tmp_path / "meant")
    save_file(meant, tmp_path / "meant" / "model.safetensors", {"format": "pt"})
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))

    told = f"model.path: the weights in .* are kept in {quantization['quant_method']};"
    for dtype in ("bfloat16", "float32"):
        with pytest.warns(UserWarning, match=f"{told} they are read back, and are {dtype} from here on"):
            read = build_model(ModelSource(path=str(tmp_path), dtype=dtype))
        found, right = (
            read.state_dict(),
            build_model(ModelSource(path=str(tmp_path / "meant"), dtype=dtype)).state_dict(),
        )
        assert found.keys() == right.keys()
        for name, tensor in right.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
        assert all(parameter.requires_grad for parameter in read.parameters())
    if family == "qwen3":
        with pytest.raises(
            ValueError, match=r"model\.quantization: the weights in .* are kept in fp8, of which no nf4"
        ):
            build_model(ModelSource(path=str(tmp_path), adapter={"r": 2}, quantization="nf4"))
    with torch.device("meta"):  # of other ranks, which get the first one's
        assert not hasattr(build_model(ModelSource(path=str(tmp_path))).config, "quantization_config")
    read.save_pretrained(tmp_path / "whole")
    again = build_model(ModelSource(path=str(tmp_path / "whole"))).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
