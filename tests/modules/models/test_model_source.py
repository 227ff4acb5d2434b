"""Models by configuration or by path; mistakes name their field."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from app.tree import TreeEngine
from datamodules.prompts.tokenizers import load_tokenizer
from modules import ModelSource, build_model
from modules.actor_critic import Critic
from modules.models import ReferencePolicy, inner_model
from modules.refusals.settings import check_own_tokens
from tests.app.test_hub import hub
from tests.app.tree.engine import families
from tests.helpers.tiny_policy import CONFIG, naive_model, parameters, source
from tests.helpers.tiny_vision import TinyVision


def test_from_configuration_and_seed() -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build_model(source()))
    first, same, other = map(parameters, models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert models[0].training and models[0].config.hidden_size == 16
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight


def test_a_model_from_a_configuration_names_no_end_of_sequence_of_its_own_accord(tmp_path: Path) -> None:
    """Llama's configuration would say 2, which is the first letter of a tokenizer of ours."""
    llama = {**CONFIG, "model_type": "llama"}
    llama.pop("head_dim", None)
    model = build_model(ModelSource(config=llama))
    assert model.config.eos_token_id is None and model.generation_config.eos_token_id is None
    model.save_pretrained(tmp_path)
    assert build_model(ModelSource(path=str(tmp_path))).generation_config.eos_token_id is None
    assert build_model(ModelSource(config={**llama, "eos_token_id": 3})).generation_config.eos_token_id == 3


@pytest.mark.parametrize(
    ("model_type", "key", "value"), [("llama", "eos_token_id", [3, 5]), ("gemma3n_text", "num_kv_shared_layers", 0)]
)
def test_several_ends_of_sequence_and_none_of_a_kind_of_layers(model_type: str, key: str, value: Any) -> None:
    config = {**CONFIG, "model_type": model_type, "num_hidden_layers": 1, key: value}
    assert getattr(build_model(ModelSource(config=config)).config, key) == value


def test_heads_of_layers_without_a_window() -> None:
    """By the names they have on the hub, of Gemma 4 alone: no other would have them as it is told."""
    config: dict[str, Any] = {**CONFIG, "model_type": "gemma4_text", "num_hidden_layers": 2, "head_dim": 4}
    config |= {"global_head_dim": 6, "hidden_size_per_layer_input": 0}
    layers = build_model(ModelSource(config=config)).config.per_layer_config
    assert [layer.head_dim for layer in layers] == [4, 6]
    with pytest.raises(ValueError, match=r"model\.config\.head_dim: -4, must be between 1"):
        build_model(ModelSource(config={**config, "head_dim": -4}))
    with pytest.raises(ValueError, match=r"model\.config\.global_head_dim is not an option of qwen3"):
        build_model(ModelSource(config={**CONFIG, "global_head_dim": 6}))


def test_from_a_directory(tmp_path: Path) -> None:
    model = naive_model(seed=3)
    model.save_pretrained(tmp_path)
    again = build_model(ModelSource(path=str(tmp_path)))
    assert again.training
    assert all(torch.equal(p, parameters(again)[name]) for name, p in parameters(model).items())
    assert build_model(ModelSource(path=str(tmp_path), dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "either model.path or model.config, neither is set"),
        ({"path": "x", "config": {}}, "either model.path or model.config, both are set"),
        ({"config": {}, "dtype": "float16"}, "model.dtype: 'float16', must be one of float32"),
        ({"config": {}}, "model.config.model_type is missing"),
        ({"config": {"model_type": "qwen33"}}, "model.config.model_type: 'qwen33'"),
        ({"config": {**CONFIG, "hiden_size": 8}}, "model.config.hiden_size is not an option of qwen3; did you mean"),
        (
            {"path": "no/such/dir"},
            "model.path: there is no directory 'no/such/dir'; name one written by save_pretrained, or a model of",
        ),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        build_model(ModelSource(**fields))


def test_without_a_hub_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"model.path: 'nobody/none' is neither a .*; name a .*: http://127\.0\.0\.1:\d+ does not answer"
    with hub(503, monkeypatch):
        pass  # nobody listens at its address any more
    with pytest.raises(ValueError, match=told):
        build_model(ModelSource(path="nobody/none"))


def test_what_lies_beside_a_directory_is_first_of_all_missing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"model.path: 'runs/modle' is no directory in 'runs', nor a model that came"):
        build_model(ModelSource(path="runs/modle"))


def test_the_tokenizer_beside_weights_that_are_nowhere_is_not_asked_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The data's tokenizer is compared with it before the model is built."""
    with hub(503, monkeypatch):
        pass
    monkeypatch.setattr(
        "modules.refusals.settings.AutoTokenizer.from_pretrained", lambda *_: pytest.fail("asks five times")
    )
    check_own_tokens(load_tokenizer("char:01", []), ModelSource(path="nobody/none"))


def test_a_mistake_in_a_reference_or_critic_names_that() -> None:
    sizes = ModelSource(config={**CONFIG, "hiden_size": 8})
    with pytest.raises(ValueError, match=r"^critic\.config\.hiden_size is not an option of qwen3"):
        build_model(sizes, key="critic")
    with pytest.raises(ValueError, match=r"^reference\.config\.hiden_size"):
        ReferencePolicy(sizes, build_model(ModelSource(config=CONFIG)), TreeEngine)


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters", "layer_types", "attention_dropout", "eos_token_id"])
def test_common_configuration_keys_are_accepted(key: str) -> None:
    values: dict[str, Any] = {
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention", "full_attention"],
        "attention_dropout": 0.0,
        "eos_token_id": 1,
    }
    build_model(ModelSource(config={**CONFIG, key: values[key]}))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_be_tied_or_not(tied: bool) -> None:
    assert build_model(ModelSource(config={**CONFIG, "tie_word_embeddings": tied})).config.tie_word_embeddings is tied


def test_new_adapters_alone_are_trained(tmp_path: Path) -> None:
    model = naive_model(seed=3)
    model.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        adapted: Any = build_model(ModelSource(path=str(tmp_path), dtype=dtype, adapter={"r": 2}))
        assert adapted.training
        trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
        assert len(trained) == 2 * 7 * 2 and all(
            "lora_" in name for name in trained
        )  # of each linear layer, not the head
        assert {one.dtype for one in trained.values()} == {torch.float32}
        inner = inner_model(adapted)
        assert type(inner) is type(model) and inner.dtype == getattr(torch, dtype)


PARTED = [
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]
WHOLE: list[dict[str, Any]] = [
    {},
    {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
]


@pytest.mark.parametrize("options", PARTED + WHOLE, ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_that_part_tied_embeddings_are_told_before_they_are_trained(
    tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    build_model(source(tie_word_embeddings=tied)).save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        build_model(ModelSource(path=str(tmp_path), adapter={"r": 2, **options}))
    told = [str(one.message) for one in warned if "arborist export --adapter" in str(one.message)]
    assert len(told) == (tied and options in PARTED), told


@pytest.mark.parametrize("excluded", [{}, {"exclude_modules": ["k_proj"]}, {"exclude_modules": r".*\.k_proj"}])
def test_new_adapters_are_on_no_tower_unless_it_is_trained(tmp_path: Path, excluded: dict[str, Any]) -> None:
    path = TinyVision(tmp_path).path
    for train_tower in (False, True):
        adapter = {"r": 2, **excluded}
        model = build_model(ModelSource(path=path, train_tower=train_tower, adapter=adapter))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert any("language_model" in name and "q_proj" in name for name in trained)
        assert any("k_proj" in name for name in trained) is not bool(excluded)
        assert any("visual" in name for name in trained) is train_tower


def test_indexers_are_trained_by_nothing(tmp_path: Path) -> None:
    """No loss reaches them: weight decay would shrink them, and adapters in them would do nothing."""
    indexed = {name: value for name, value in families.INDEXED.items() if name != "num_experts"}
    config = {**CONFIG, **indexed, "model_type": "deepseek_v32"}
    model = build_model(ModelSource(config=config))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (".indexer." not in name)
    model.save_pretrained(tmp_path)
    adapted = build_model(ModelSource(path=str(tmp_path), adapter={"r": 2}))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert any("kv_b_proj" in name for name in trained) and not any("indexer" in name for name in trained)
    for copied in ("indexer", "wk"):
        saving = ModelSource(path=str(tmp_path), adapter={"r": 2, "modules_to_save": [copied]})
        with pytest.raises(ValueError, match=r"model\.adapter: modules_to_save names an indexer or a part of one"):
            build_model(saving)


@pytest.mark.parametrize(
    ("family", "unlike"),
    [
        (families.SUPPORTED["Llama 4"], ".router"),
        (families.SUPPORTED["DeepSeek-V4"], ".o_a_proj"),
        (families.Family("phimoe", {"router_jitter_noise": 0.0}), ".router"),
        (families.Family("falcon", {"new_decoder_architecture": True}), None),
    ],
    ids=lambda row: getattr(row, "type", row),
)
def test_new_adapters_are_on_what_computes_as_a_linear_layer(
    tmp_path: Path, family: families.Family, unlike: str | None
) -> None:
    """PEFT goes by the class alone: on a router that returns experts too its adapter failed in the first pass. A linear
    layer that its family only writes otherwise (Falcon's) has one."""
    families.build(family).save_pretrained(tmp_path)
    model = build_model(ModelSource(path=str(tmp_path), dtype="float32", adapter={"r": 2}))
    linear = {name for name, part in model.named_modules() if isinstance(getattr(part, "base_layer", None), nn.Linear)}
    assert linear and not any(unlike is not None and name.endswith(unlike) for name in linear)
    assert unlike is None or any(name.endswith(unlike) for name, _ in model.named_modules())
    model(input_ids=torch.tensor([families.STEM])).logits.sum().backward()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row in ("Nemotron-H", "Llama 4") else pytest.mark.slow)
        for row in families.SUPPORTED
    ],
)
def test_new_adapters_that_name_nothing_are_on_every_family(tmp_path: Path, row: str) -> None:
    families.build(families.SUPPORTED[row]).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "You have passed exclude_modules")  # nobody has
        model = build_model(ModelSource(path=str(tmp_path), dtype="float32", adapter={"r": 2}))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("row", "adapter", "places"),
    [
        ("Mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}, {"q_proj", "gate_up_proj", "down_proj"}),
        ("Qwen3-MoE", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "gate"]}, None),
        (
            "GPT-OSS",
            {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
            {"q_proj", "down_proj"},
        ),
        (
            "GPT-OSS",
            {"target_modules": ["q_proj", "up_proj"]},
            "'up_proj' has no place .* called down_proj, gate_up_proj",
        ),
        ("GPT-OSS", {"target_parameters": ["down_proj", "upp"]}, "parameters: 'upp' has no place in this model"),
        ("Phi-3", {"target_modules": ["o_proj", "q_proj"]}, "'q_proj' has no place .* lm_head, o_proj, qkv_proj"),
        ("Llama 4", {"target_modules": ["q_proj", "router"]}, "'router' names layers that get no adapter: routers"),
    ],
)
def test_every_name_of_an_adapter_has_a_place(
    tmp_path: Path, row: str, adapter: dict[str, Any], places: set[str] | str | None
) -> None:
    """PEFT trained the others in silence: lists that are copied from a model that calls its layers otherwise."""
    families.build(families.SUPPORTED[row]).save_pretrained(tmp_path)
    source = ModelSource(path=str(tmp_path), dtype="float32", adapter={"r": 2, **adapter})
    if isinstance(places, str):
        with pytest.raises(ValueError, match=rf"model\.adapter\.target_.*{places}"):
            build_model(source)
        return
    tuner: Any = build_model(source).base_model
    found = {name.rpartition(".")[2] for name in (*tuner.targeted_module_names, *tuner.targeted_parameter_names)}
    assert found == (places or {"q_proj", "gate_up_proj", "down_proj", "weight"})  # of the gate


def test_an_adapter_that_has_weights_in_indexers_trains_the_others(tmp_path: Path) -> None:
    indexed = {name: value for name, value in families.INDEXED.items() if name != "num_experts"}
    model = build_model(ModelSource(config={**CONFIG, **indexed, "model_type": "deepseek_v32"}))
    model.save_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(target_modules=["wk", "kv_b_proj"])).save_pretrained(tmp_path / "adapter")
    adapted = build_model(ModelSource(path=str(tmp_path / "base"), adapter=str(tmp_path / "adapter")))
    trained = {name: parameter.requires_grad for name, parameter in adapted.named_parameters() if "lora" in name}
    assert {name for name, is_trained in trained.items() if not is_trained} == {n for n in trained if "indexer" in n}
    assert any("indexer" in name for name in trained) and any(trained.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_an_adapter_is_the_same_on_ranks_without_weights(tmp_path: Path, dtype: str) -> None:
    """Ranks of a sharded run make it without storage; PEFT saves that it is for inference."""
    build_model(ModelSource(config=CONFIG)).save_pretrained(tmp_path / "base")
    new = ModelSource(path=str(tmp_path / "base"), dtype=dtype, adapter={"r": 2})
    build_model(new).save_pretrained(tmp_path / "adapter")

    def trained(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (p.shape, p.dtype) for name, p in model.named_parameters() if p.requires_grad}

    for named in (new, replace(new, adapter=str(tmp_path / "adapter"))):
        whole = trained(build_model(named))
        with torch.device("meta"):
            assert trained(build_model(named)) == whole and whole


def _adapter(directory: Path, base: Path) -> Path:
    build_model(ModelSource(path=str(base), adapter={"r": 2, "target_modules": ["q_proj"]})).save_pretrained(directory)
    return directory


def test_an_adapter_of_another_model_is_refused_or_told(tmp_path: Path) -> None:
    for name, layers in (("base", 2), ("deep", 3), ("flat", 1), ("other", 2), ("run/base", 2)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        build_model(ModelSource(config={**CONFIG, "num_hidden_layers": layers})).save_pretrained(tmp_path / name)
    adapter = _adapter(tmp_path / "adapter", tmp_path / "base")

    def built(base: str) -> Any:
        return build_model(ModelSource(path=str(tmp_path / base), adapter=str(adapter)))

    with pytest.raises(ValueError, match=r"model.adapter: .*none for .*layers\.2\..*name the model it was trained on"):
        built("deep")
    with pytest.raises(ValueError, match=r"model.adapter: .*weights for layers that the model has not, .*layers\.1\."):
        built("flat")
    with pytest.warns(UserWarning, match=r"model.adapter: .*was trained on '.*base', and model.path is '.*other'"):
        built("other")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "model.adapter")
        built("base")
        shutil.move(tmp_path / "base", tmp_path / "moved")
        built("run/base")  # as the model may be named elsewhere


def test_an_adapter_that_had_dropout_is_gone_on_with_without(tmp_path: Path) -> None:
    build_model(ModelSource(config=CONFIG)).save_pretrained(tmp_path / "base")
    adapter = _adapter(tmp_path / "adapter", tmp_path / "base") / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.05'))
    source = ModelSource(path=str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    with pytest.warns(UserWarning, match=r"model.adapter: '.*adapter' says lora_dropout 0.05; .* goes on with 0"):
        model: Any = build_model(source)
    assert not [one for one in model.modules() if isinstance(one, torch.nn.Dropout) and one.p]
    assert any(parameter.requires_grad for parameter in model.parameters())
    assert model.peft_config["default"].lora_dropout == 0


def test_an_adapter_that_would_be_drawn_again_is_refused(tmp_path: Path) -> None:
    """Of PiSSA PEFT saves how it began, by which the model below it is made again: by chance another, or the same."""
    build_model(ModelSource(config=CONFIG)).save_pretrained(tmp_path / "base")
    base, adapter = str(tmp_path / "base"), tmp_path / "adapter"
    first: Any = build_model(
        ModelSource(path=base, adapter={"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa"})
    ).eval()
    first.save_pretrained(adapter)
    tokens = torch.arange(8)[None]
    again: Any = build_model(ModelSource(path=base, adapter=str(adapter))).eval()
    torch.testing.assert_close(again(tokens).logits, first(tokens).logits, atol=1e-5, rtol=0)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"pissa"', '"pissa_niter_4"'))
    with pytest.raises(ValueError, match=r"model.adapter: .*init_lora_weights: 'pissa_niter_4' is .* use 'pissa'"):
        build_model(ModelSource(path=base, adapter=str(adapter)))


def test_an_adapter_whose_layers_share_a_tensor_is_gone_on_with(tmp_path: Path) -> None:
    """VB-LoRA's vectors, which are written under the name that one layer has for them."""
    build_model(ModelSource(config=CONFIG)).save_pretrained(tmp_path / "base")
    options = {"peft_type": "VBLORA", "num_vectors": 4, "vector_length": 2, "target_modules": ["q_proj", "v_proj"]}
    first: Any = build_model(ModelSource(path=str(tmp_path / "base"), adapter={**options, "r": 2, "topk": 2}))
    first.save_pretrained(tmp_path / "adapter")
    again: Any = build_model(ModelSource(path=str(tmp_path / "base"), adapter=str(tmp_path / "adapter")))
    of = [{n: p for n, p in one.named_parameters() if "vblora" in n} for one in (first, again)]
    assert of[0] and all(torch.equal(p, of[1][n]) and of[1][n].requires_grad for n, p in of[0].items())


def test_a_directory_of_several_adapters_is_refused(tmp_path: Path) -> None:
    naive_model(seed=3).save_pretrained(tmp_path / "base")
    adapter, base = _adapter(tmp_path / "two", tmp_path / "base"), str(tmp_path / "base")
    _adapter(adapter / "checkpoint-10", tmp_path / "base")  # as a trainer leaves earlier states
    build_model(ModelSource(path=base, adapter=str(adapter)))
    second = _adapter(adapter / "second", tmp_path / "base")  # as PEFT writes it
    with pytest.raises(
        ValueError, match=r"model.adapter: .*its own and those in its folders second, .*name .*two/second"
    ):
        build_model(ModelSource(path=base, adapter=str(adapter)))
    build_model(ModelSource(path=base, adapter=str(second)))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"model.adapter: .*in its folders checkpoint-10, second; name one"):
        build_model(ModelSource(path=base, adapter=str(adapter)))


def test_a_model_with_an_adapter_beside_it_is_refused(tmp_path: Path) -> None:
    """transformers loads both, and nothing of either would be trained."""
    naive_model(seed=3).save_pretrained(tmp_path / "both")
    adapter = _adapter(tmp_path / "adapter", tmp_path / "both")
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, tmp_path / "both")
    for given in (None, str(adapter), {"r": 2}):
        with pytest.raises(ValueError, match=r"model.path: '.*both' holds an adapter beside a model.* model.adapter"):
            build_model(ModelSource(path=str(tmp_path / "both"), adapter=given))


def test_a_critic_has_the_adapters_of_its_policy(tmp_path: Path) -> None:
    naive_model(seed=3).save_pretrained(tmp_path)
    source = ModelSource(path=str(tmp_path), adapter={"r": 2})
    for trunk in ("initial", source):
        critic = Critic(trunk, build_model(source))  # type: ignore[arg-type]
        assert type(critic.trunk).__name__ == "Qwen3Model"
        trained = [name for name, one in critic.trunk.named_parameters() if one.requires_grad]
        assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": CONFIG, "adapter": {"r": 2}}, "model.adapter: the weights of model.config are random"),
        ({"adapter": {"rank": 2}}, "model.adapter.rank is not an option of LORA"),
        ({"adapter": {"lora_alfa": 2}}, "model.adapter.lora_alfa is not an option of LORA; did you mean 'lora_alpha'"),
        ({"adapter": {"peft_type": "LORRA"}}, "model.adapter.peft_type: 'LORRA' is not one of"),
        ({"adapter": {"target_modules": ["k_prj"]}}, "model.adapter: Target modules .*k_prj"),
        ({"adapter": {"target_modules": ["k_proj", "q_prj"]}}, "'q_prj' has no place in this model.* q_proj, up_proj"),
        (
            {"adapter": {"modules_to_save": ["lm_hed"]}},
            "model.adapter.modules_to_save: 'lm_hed' has no place in .*lm_head",
        ),
        (
            {"adapter": {"layers_to_transform": [0, 7], "target_modules": ["q_proj"]}},
            "model.adapter.layers_to_transform: no layer 7 has a module",
        ),
        ({"adapter": {"r": 0}}, "model.adapter: .*r"),
        ({"adapter": {"lora_dropout": 0.1}}, "model.adapter.lora_dropout: 0.1, must be 0"),
        ({"adapter": {"peft_type": "LOHA", "rank_dropout": 0.5}}, "model.adapter.rank_dropout: 0.5, must be 0"),
        (
            {"adapter": {"peft_type": "ADALORA", "total_step": 9}},
            "model.adapter.peft_type: ADALORA gives ranks .*use LORA",
        ),
        ({"adapter": {"peft_type": "LILY"}}, "model.adapter.peft_type: LILY mixes .* a mean over all tokens"),
        ({"adapter": {"peft_type": "PVERA"}}, "model.adapter.peft_type: PVERA draws .* use VERA"),
        (
            {"adapter": {"init_lora_weights": "eva"}},
            "model.adapter.init_lora_weights: 'eva' .*initialize_lora_eva_weights",
        ),
        ({"adapter": {"alora_invocation_tokens": [5]}}, "model.adapter.alora_invocation_tokens: it works behind those"),
        ({"adapter": {"layer_replication": [[0, 2], [1, 2]]}}, "model.adapter.layer_replication: .* leave it out"),
        ({"adapter": {"init_lora_weights": "pissa_niter_4"}}, "model.adapter.init_lora_weights: .* use 'pissa'"),
        ({"adapter": "nowhere"}, "model.adapter: 'nowhere' holds no adapter for"),
        ({"path": "{here}/adapter"}, "model.path: '.*adapter' holds an adapter alone: name it in model.adapter"),
    ],
)
def test_mistakes_of_adapters(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # which it read from its variable
    naive_model(seed=3).save_pretrained(tmp_path / "base")
    build_model(ModelSource(path=str(tmp_path / "base"), adapter={})).save_pretrained(tmp_path / "adapter")
    fields = {"path": str(tmp_path / "base"), **fields} if "config" not in fields else fields
    fields["path"] = fields["path"].format(here=tmp_path) if "path" in fields else None
    with pytest.raises(ValueError, match=message):
        build_model(ModelSource(**fields))


@pytest.mark.parametrize("key", ["num_labels", "hidden_size"])
def test_a_count_is_no_yes_or_no(key: str) -> None:
    """Nor where a saved configuration leaves it out, as it does labels."""
    with pytest.raises(ValueError, match=rf"model\.config\.{key}: True, must be "):
        build_model(ModelSource(config={"model_type": "qwen3", key: True}))
