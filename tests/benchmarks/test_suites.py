"""The systems the benchmarks compare, and the GPU suite at toy size: every system is there, no figure is missing."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from app.tree import FlatOutputs, on_device
from app.tree.planning.plan import ExecutionPlan
from benchmarks import gpu_suite
from benchmarks.common import systems
from benchmarks.common.measure import environment, measure, ranked
from benchmarks.common.models import TOY_SHAPE
from benchmarks.common.systems import (
    NAMES,
    Settings,
    gradient_error,
    make_systems,
    merged,
    path_plan,
    qwen3,
    weighted_loss,
)
from benchmarks.common.workloads import WORKLOADS, conversations, make_case, synthetic
from benchmarks.gpu import hybrids, parity
from benchmarks.gpu.decode import check_decoding
from benchmarks.gpu.parity import check_engine, check_kernels, check_torch
from modules import PolicyModule


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_case(result: dict) -> None:
    rows = result["systems"]
    assert tuple(rows) == ("ours", *NAMES[:-1])
    for row in rows.values():
        assert row["tokens"] > 0 and row["pairs"] >= row["tokens"] and row["flops"] >= row["least_flops"] > 0
        assert 0 < row["measured_share"] <= 1
        for clock in ("cpu_seconds", "wall_seconds"):
            assert row[clock]["min"] <= row[clock]["median"] <= row[clock]["max"]
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert tokens["dense"] >= tokens["dense-leaf"] > tokens["ours"] == tokens["sparse"] == tokens["path-at-a-time"]
    for ratios in result["against_ours"].values():
        assert set(ratios) == set(NAMES) - {"ours"}
        assert all(r["of_limit"] == pytest.approx(r["ratio"] / r["flop_limit"]) for r in ratios.values())


@pytest.mark.slow
def test_gpu_suite_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--repeats", "1", "--workloads", "think", "--profile", "--attention", "sdpa", "--train", "0.6B"]
    swept = ["--sweep", "chunk=32", "head=8,64", "attention=sdpa"]
    report = gpu_suite.main(["--toy", *options, *swept, "--out", str(tmp_path)])
    assert report["passed"], capsys.readouterr().out
    written = json.loads((tmp_path / "gpu_toy.json").read_text())
    assert "not GPU figures" in written["figures"] and "not GPU figures" in capsys.readouterr().out
    assert all(written["checks"][name] for name in ("torch", "kernels", "engine", "self_check", "states", "decoding"))
    assert all(0 < row["gradients"] < row["margin"] for row in written["checks"]["self_check"])
    (case,) = written["cases"]
    check_case(case)
    assert "checkpointing" in case["systems"]["dense"]["detail"]
    assert case["utilisation"]["tree_over_dense"] > 0 and case["profile"][0]["share"] > 0
    assert written["plot"] == (tmp_path / "gpu_toy.png").exists() and not written["left_out"]
    engine = written["checks"]["engine"]
    assert {row["window"] for row in engine} == {None, 70} and {row["attention"] for row in engine} >= {"auto"}
    assert written["attention"] == "sdpa"
    points = written["sweep"]["systems"]
    assert list(points) == ["ours", "chunk=32", "head=8", "head=64", "attention=sdpa"]
    assert written["sweep"]["tflops"].keys() == points.keys()
    assert "chunks of at most 32" in points["chunk=32"]["detail"] != points["ours"]["detail"]
    assert points["head=8"]["predicted_bytes"] < points["head=64"]["predicted_bytes"]
    page = (tmp_path / "gpu.md").read_text()
    assert page.index("not understood below") < page.index("not GPU figures") and "| 0.6B | 237 | 180 |" in page
    assert all(f"| {name} | " in page for name in (*case["systems"], *points, "self_check", "tree_tflops"))
    assert "### Whole optimizer steps" in page
    trained = json.loads((tmp_path / "gpu_train.json").read_text())["train"]
    assert trained["ranks"] == 1 and len(trained["steps"]) == 3
    assert all(step["seconds"] > 0 < step["tree_tokens"] for step in trained["steps"])


def test_commands_of_the_suite_ask_for_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its help is the plan of a first hour on a GPU: every line parses, and does what it promises."""
    lines = str(gpu_suite.__doc__).replace("\\\n", " ").splitlines()
    commands = [line.split("#")[0].split()[3:] for line in lines if line.startswith("    python")]
    asked = [gpu_suite._parser().parse_args(command) for command in commands]
    assert [one.checks for one in asked] == ["flash", "none", "none", "none", "none", "none", "flex", "all"]
    assert [one.hybrid for one in asked] == [None] * 4 + ["4B"] + [None] * 3
    assert [one.decode for one in asked] == [None] * 5 + ["0.6B"] + [None] * 2
    assert [dict(one.sweep) for one in asked if one.sweep] == [
        {
            "chunk": [2048, 8192, 32768],
            "head": [220, 4096],
            "attention": ["flash", "cudnn", "triton"],
            "elementwise": ["compile"],
        }
    ]
    assert asked[3].train == "4B" and asked[2].size == ["8B"] and asked[1].profile
    assert [one.workloads for one in asked[3:7]] == [["none"]] * 4


def test_a_quarter_of_an_hour_of_a_gpu_is_enough_for_its_commands() -> None:
    """Those of benchmarks/README.md: each parses, ends by itself before it is ended, and adds to one folder."""
    root = Path(gpu_suite.__file__).parents[1]
    page = (root / "benchmarks" / "README.md").read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("timeout ")]
    together = {int(line[1]) for line in lines if line[-1] == "&"}
    assert max(together) + sum(int(line[1]) for line in lines if line[-1] != "&") <= 15 * 60
    assert all(line[2:4] == ["python", "-m"] for line in lines)
    assert [line[4] for line in lines if line[4] != "benchmarks.gpu_suite"] == ["pytest", "benchmarks.gpu.blocks"]
    assert all((root / path).exists() for line in lines for path in line if path.startswith("tests/"))
    suites = [[part for part in line if part != "&"] for line in lines if line[4] == "benchmarks.gpu_suite"]
    asked = [(int(line[1]), gpu_suite._parser().parse_args(line[5:])) for line in suites]
    assert [(one.checks, one.size, one.train, one.hybrid) for _, one in asked] == [
        ("flash", ["0.6B"], None, None),
        ("flex", ["0.6B"], None, None),
        ("none", ["0.6B"], None, None),
        ("none", ["8B"], None, None),
        ("none", ["0.6B"], "4B", None),
        ("none", ["0.6B"], None, "4B"),
    ]
    assert all(one.limit < seconds for seconds, one in asked if one.workloads != ["none"] or one.hybrid)
    assert [one.out for _, one in asked] == ["$OUT", "$OUT/compiled", *["$OUT"] * 4]  # checks write one file a folder


@pytest.mark.slow
def test_hybrids_are_checked_and_measured(tmp_path: Path) -> None:
    """By length of a piece, through waves; and long prompts beside dense, at toy size."""
    rows = hybrids.check_states(torch.device("cpu"))
    assert all(row["ok"] for row in rows) and rows[-1]["left_out"] == "needs a GPU"
    assert [row["pieces"] for row in rows[:6]] == [*([n] for n in hybrids.PIECES), list(hybrids.PIECES)]
    assert len(rows) == 3 * 6 + 1 and all(0 < row["worst"] < row["limit"] for row in rows[:-1])
    options = ["--checks", "none", "--workloads", "none", "--hybrid", "4B", "--repeats", "1", "--sample", "2"]
    report = gpu_suite.main(["--toy", *options, "--out", str(tmp_path)])
    written = json.loads((tmp_path / "gpu_hybrid_toy.json").read_text())
    assert written == report and [case["longest"] for case in report["cases"]] == [258, 258, 272]
    for case in report["cases"]:
        check_case(case)
        assert case["systems"]["dense"]["tokens"] == 8 * case["longest"]
    with torch.device("meta"):
        fields = {"max_position_embeddings": 32768}
        for size, billions in (("4B", 4.2), ("9B", 9.0)):
            model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**hybrids.SHAPES[size], **fields))
            assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.05)


def test_decoding_is_checked_and_measured(tmp_path: Path) -> None:
    """On a CPU the padded steps stand in for graphs."""
    rows = check_decoding(torch.device("cpu"))
    assert all(row["ok"] and row["decoding"] == "padded" and row["worst"] < 1e-5 for row in rows) and len(rows) == 5
    options = ["--checks", "none", "--workloads", "none", "--decode", "0.6B"]
    report = gpu_suite.main(["--toy", *options, "--out", str(tmp_path)])
    written = json.loads((tmp_path / "gpu_decode_toy.json").read_text())
    assert written == report and [row["requests"] for row in report["decoding"]] == [1, 16, 128]
    assert all(row["graphs_tokens_per_s"] > 0 < row["eager_tokens_per_s"] for row in report["decoding"])
    assert "| requests | prompt |" in (tmp_path / "gpu.md").read_text()


def test_checks_are_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks themselves run in the suite above. A later command without any leaves what they found."""
    monkeypatch.setattr(gpu_suite, "check_engine", lambda device, attentions: [{"ok": True, "system": "ours"}])
    options = ["--toy", "--workloads", "none", "--out", str(tmp_path), "--checks"]
    report = gpu_suite.main([*options, "flex"])
    assert set(report["checks"]) == {"engine"} and report["passed"]
    assert gpu_suite.main([*options, "none"])["checks"] == {}
    assert set(json.loads((tmp_path / "gpu_checks.json").read_text())["checks"]) == {"engine"}
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == 2  # what was expected, and the checks


class Broken(Exception):
    """What nobody expects."""


def broken(*_: object, **__: object) -> NoReturn:
    raise Broken("no such instruction")


def test_a_failed_check_system_or_part_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told, written and in the page, and the command ends with exit code 1."""
    for name in ("check_torch", "check_kernels", "check_margin", "check_decoding"):
        monkeypatch.setattr(gpu_suite, name, lambda *_: [{"ok": True, "check": "fine"}])
    monkeypatch.setattr(gpu_suite, "check_engine", broken)
    monkeypatch.setattr(hybrids, "compare", broken)
    monkeypatch.setattr(gpu_suite, "utilisation", broken)
    monkeypatch.setattr(systems.PathEngine, "backward", broken)
    written: list[tuple[str, int]] = []
    write = gpu_suite._write
    monkeypatch.setattr(
        gpu_suite,
        "_write",
        lambda report, out, name: written.append((name, len(report["checks"]))) or write(report, out, name),
    )
    options = ["--toy", "--checks", "flash", "--workloads", "turns", "--repeats", "1", "--sweep", "attention=nothing"]
    report = gpu_suite.main([*options, "chunk=32", "--out", str(tmp_path)])
    assert not report["passed"]
    assert [count for name, count in written if name == "checks"] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        7,
    ]  # after each group, and all
    checked = json.loads((tmp_path / "gpu_checks.json").read_text())
    assert not checked["passed"] and checked["checks"]["engine"] == [
        {"check": "engine", "ok": False, "error": "Broken: no such instruction"}
    ]
    states = checked["checks"]["states"]
    assert len(states) == 3 * 6 + 1 and all(row["ok"] is ("left_out" in row) for row in states)
    measured = json.loads((tmp_path / "gpu_toy.json").read_text())
    (case,) = measured["cases"]
    assert set(case["failed"]) == {"path-at-a-time", "utilisation"} and not measured["passed"]
    assert set(case["systems"]) == set(NAMES) - {"path-at-a-time"} == {"ours", *case["against_ours"]["wall_seconds"]}
    assert list(measured["sweep"]["systems"]) == ["ours", "chunk=32"] and list(measured["sweep"]["failed"]) == [
        "attention=nothing"
    ]
    assert "attention must be" in measured["sweep"]["failed"]["attention=nothing"]
    page, said = (tmp_path / "gpu.md").read_text(), capsys.readouterr()
    for part in ("path-at-a-time", "utilisation", "attention=nothing"):
        assert f"**Failed: {part}.**" in page and f"FAILED: {part}: " in said.out
    assert "no such instruction" in page and "Traceback" in said.err


def test_a_system_that_fails_later_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios are of repeats that all made; without a place for failures the error is the caller's."""
    model = qwen3(**TOY_SHAPE, vocabulary=512)
    case = make_case(*conversations(toy=True), "turns", 1, 2, 512)
    made = make_systems(model, case, Settings(64, 96))
    counts = iter(range(100))
    made[1] = replace(made[1], run=lambda: broken() if next(counts) > 1 else None)
    told: list[set[str]] = []
    rows = measure(model, made, 2, failed=(failed := {}), so_far=lambda some: told.append(set(some)))
    assert list(failed) == ["dense-leaf"] and set(rows) == set(NAMES) - {"dense-leaf"}
    assert told[0] == {"dense"} and told[1] == {"dense", "dense-leaf"} and told[-1] == set(rows)
    assert all(len(row["wall_seconds"]["runs"]) == 2 for row in rows.values())
    with pytest.raises(Broken):
        measure(model, made[1:2], 1)


@pytest.mark.parametrize("missing", [False, True])
def test_steps_that_fail_or_cannot_run_are_said(
    missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.gpu import train

    steps = iter(range(10))
    monkeypatch.setattr(PolicyModule, "training_step", on_call(PolicyModule.training_step, lambda: next(steps) == 1))
    if missing:
        monkeypatch.delitem(sys.modules, train.__name__)
        monkeypatch.delattr("benchmarks.gpu.train")
        monkeypatch.setitem(sys.modules, "lightning", None)  # as where it is not installed
    options = ["--toy", "--checks", "none", "--workloads", "none", "--train", "0.6B", "--out", str(tmp_path)]
    report = gpu_suite.main(options)
    written = json.loads((tmp_path / "gpu_train.json").read_text())
    assert not report["passed"] and not written["passed"] and written["conversations"] == "synthetic"
    said = "for want of the module lightning" if missing else "Broken: no such instruction (in step 2)"
    assert said in written["failed"]["train"] and len(written["train"]["steps"]) == (0 if missing else 1)
    assert "conversations: synthetic" in capsys.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert "**Failed: train.**" in page and "conversations synthetic" in page


def on_call(method: Any, when: Callable[[], bool]) -> Any:
    return lambda *args, **given: broken() if when() else method(*args, **given)


@pytest.mark.slow
def test_backends_of_low_precision_are_not_asked_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU in the place of a GPU, whose flash kernels compute what `sdpa` does: theirs is the rule of dtypes. Of the
    tree a part will do: bf16 is slow on a CPU, and the suite at toy size takes all of it."""
    whole = parity._fork_case(0)
    part = replace(whole, sequences=whole.sequences[:3], scored=whole.scored[:3], weights=whole.weights[:3])
    monkeypatch.setattr(parity, "_fork_case", lambda seed: part)
    from app.tree.attention import flash, packages
    from app.tree.attention.kernels import FLASH_DTYPES
    from app.tree.attention.part_attention import PartBackend

    def refusal(device, dtype, width):
        return None if dtype in FLASH_DTYPES else f"computes low precision, not {dtype}"

    monkeypatch.setattr(flash, "flash_refusal", refusal)
    for backend in (flash.FlashBackend, packages.CudnnBackend):
        for name in ("kernel", "parts", "calls"):
            monkeypatch.setattr(backend, name, getattr(PartBackend, name))
        monkeypatch.setattr(backend, "masked_block", PartBackend.masked_block)
    rows = check_engine(torch.device("cpu"), ("sdpa", "flash", "cudnn"))
    assert [row for row in rows if not row["ok"]] == []
    found = {(row["attention"], row["dtype"]) for row in rows}
    assert found == {("sdpa", "float32"), *((name, "bfloat16") for name in ("sdpa", "flash", "cudnn"))}


def test_compiled_attention_is_checked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.dtype]] = []

    def run(case, window, elementwise, attention, dtype, device, names):
        asked.append((attention, dtype))
        return {name: {"weight": torch.ones(2)} for name in names}

    monkeypatch.setattr(parity, "_run_engine", run)
    monkeypatch.setattr(parity, "_computes", lambda *_: True)
    gpu_suite.checks(torch.device("cuda"), "flex")
    assert {one for one in asked if one[0] == "flex"} == {("flex", torch.float32), ("flex", torch.bfloat16)}


def test_a_profile_counts_kernels_once() -> None:
    """Beside each stand the operator that launched it and the range it was in, with the same microseconds."""

    def event(key: str, device: str, spent: float, **more: bool) -> SimpleNamespace:
        times = {"self_device_time_total": spent, "self_cpu_time_total": 1000.0}
        return SimpleNamespace(key=key, count=2, device_type=getattr(DeviceType, device), **times, **more)

    events = [event("aten::mm", "CPU", 3e3), event("gemm", "CUDA", 3e3, is_user_annotation=False)]
    events += [event("triton", "CUDA", 1e3), event("a range", "CUDA", 4e3, is_user_annotation=True)]
    found = {row["operator"]: (row["milliseconds"], row["share"]) for row in ranked(events, True, 5)}
    assert found == {"gemm": (3.0, 0.75), "triton": (1.0, 0.25)}
    assert {row["operator"] for row in ranked(events[:1], False, 5)} == {"aten::mm"}


def test_a_gpus_environment_names_what_figures_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr("benchmarks.common.measure._driver", lambda: "580.1")
    found = environment(torch.device("cuda"))
    assert found["triton"] == version("triton") and found["fla-core"] == "not installed" and found["driver"] == "580.1"
    assert {"cuda", "cudnn", "gpu_memory_gib", "torch", "transformers"} <= set(found)


def test_the_common_loss_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factors go through `on_device`, which pins them."""
    case = make_case(*conversations(toy=True), "turns", 1, 2, 512).pick([0, 1])
    moved: list[int] = []
    monkeypatch.setattr(systems, "on_device", lambda values, *how: moved.append(len(values)) or on_device(values, *how))
    out = FlatOutputs(torch.tensor([0, 3, 5]), logprobs=torch.arange(5.0))
    loss = weighted_loss(case, torch.device("cpu"))(out, torch.tensor([1, 0]))
    assert float(loss) == pytest.approx(3 * case.weights[1] + 7 * case.weights[0]) and moved == [5]


@pytest.mark.parametrize("words", ["chunk", "rows=3", "chunk=0", "head=many"])
def test_a_sweep_of_something_else_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_suite.main(["--toy", "--sweep", words])
    assert words in capsys.readouterr().err


def test_a_gpu_without_flash_kernels_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.tree.attention import kernels, packages
    from benchmarks.gpu import parity
    from benchmarks.gpu.parity import backends

    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    monkeypatch.setattr(parity, "find_spec", lambda name: object())
    everything = ("sdpa", "flash", "cudnn", "triton", "flex")
    for capability, expected in (((7, 5), ("sdpa", "flex")), ((9, 0), everything)):
        for module in (kernels, packages):
            monkeypatch.setattr(module, "capability", lambda device, found=capability: found)
        assert backends(torch.device("cuda")) == expected
        assert backends(torch.device("cuda"), compiled=False) == expected[:-1]


def test_time_limit_leaves_workloads_out_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = gpu_suite.main(["--toy", "--checks", "none", "--limit", "0", "--workloads", "turns", "whole"])
    assert report["cases"] == [] and report["left_out"] == ["turns", "whole"]
    assert "not measured: turns, whole" in capsys.readouterr().out


def test_without_gpu_the_suite_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        gpu_suite.main(["--size", "0.6B"])
    assert "--toy" in capsys.readouterr().err


@pytest.mark.slow
def test_checks_notice_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log-sum-exp that is off shows in every dtype; an operator this torch lacks is named."""
    from app.tree.attention import kernels

    right = kernels.CpuFlash.forward

    def wrong(self, q, k, v, causal, mask, scale):
        out, lse, saved = right(self, q, k, v, causal, mask, scale)
        return out, lse + 0.1 * causal, saved

    monkeypatch.setattr(kernels.CpuFlash, "forward", wrong)
    failed = [row for row in check_kernels(torch.device("cpu")) if not row["ok"]]
    assert {row["dtype"] for row in failed} == {"float64", "float32", "bfloat16", "float16"}
    assert {row["kernel"] for row in failed} == {"CpuFlash"} and {row["part"] for row in failed} == {"causal"}
    monkeypatch.setattr("benchmarks.gpu.parity.inspect.getsource", lambda module: "_aten._no_such_thing_for_cpu(")
    assert [row["check"] for row in check_torch(torch.device("cpu")) if not row["ok"]] == [
        "aten::_no_such_thing_for_cpu"
    ]


def test_gradient_error_of_nan_is_nan() -> None:
    good, bad = {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])}
    assert gradient_error(good, good) == {"norm": 0.0, "largest": 0.0}
    assert all(np.isnan(value) for value in gradient_error(bad, good).values())


@pytest.mark.parametrize("workload", WORKLOADS)
def test_path_plan_runs_every_token_once_with_gradient(workload: str) -> None:
    case = make_case(*conversations(toy=True), workload, 2, 3, 512)
    built = case.tree()
    plan: ExecutionPlan = path_plan(built, 40)
    forward = [step.chunk for step in plan.steps if step.action == "forward"]
    backward = [step.chunk for step in plan.steps if step.action == "backward"]
    assert sorted(forward) == sorted(backward) == list(range(len(plan.chunks)))
    covered = np.concatenate([np.arange(p.start, p.stop) for c in plan.chunks for p in c.pieces])
    assert np.array_equal(np.sort(covered), np.arange(built.num_tokens))
    assert all(len(c.pieces) == 1 and c.tokens <= 40 for c in plan.chunks) and plan.peak_live_tokens <= 40
    place = {chunk: position for position, chunk in enumerate(backward)}
    assert all(place[i] < place[c.parent] for i, c in enumerate(plan.chunks) if c.parent >= 0)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_merged_sequences_keep_every_factor(workload: str) -> None:
    case = make_case(*conversations(toy=True), workload, 2, 2, 512)
    items, built = merged(case), case.tree()
    assert sum(len(item.tokens) for item in items) == built.num_leaf_tokens
    expected = sum(mask.sum() * weight for mask, weight in zip(case.scored, case.weights))
    assert sum(item.factors.sum() for item in items) == pytest.approx(expected)


def test_sizes_and_shapes_of_made_conversations() -> None:
    made = synthetic(tasks=3, trials=2, system=30, task=5, turns=(2, 3), message=(4, 6))
    assert len(made) == 6 and all((c.tokens[:30] == made[0].tokens[:30]).all() for c in made)
    with pytest.raises(ValueError, match=r"size 4x2: made has 3 tasks of at least 2 trials"):
        make_case("made", made, "turns", 4, 2, 100)
    case = make_case("made", made, "whole", 2, 2, 100)
    assert len(case.sequences) == 4 and max(int(s.max()) for s in case.sequences) < 100
