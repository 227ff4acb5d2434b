"""`arborist doctor`: real runs that hang in every way are asked where they are, and the machine is examined."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from packaging.requirements import Requirement

from app.cli import main
from app.cli.doctor import machine
from app.cli.doctor.dump import NoSuchRun, dump
from app.cli.doctor.findings import Finding
from tests.helpers.clock import Clock
from tests.helpers.tiny_model import TINY_WITH_ENDS

ROOT = Path(__file__).resolve().parents[4]

# A tiny random model, and a reward that never returns for the third prompt.
RUN = {
    "seed_everything": 0,
    "trainer": {
        "enable_progress_bar": False,
        "accelerator": "cpu",
        "max_steps": 5,
        "enable_checkpointing": False,
        "callbacks": [{"class_path": "callbacks.WeightSync"}],
    },
    "model": {
        "class_path": "modules.PolicyModule",
        "init_args": {
            "model": {"config": {**TINY_WITH_ENDS, "vocab_size": 17}},
        },
    },
    "data": {
        "class_path": "datamodules.RolloutDataModule",
        "init_args": {
            "workflow": {"class_path": "datamodules.workflows.RLVRWorkflow", "init_args": {"max_new_tokens": 3}},
            "engine": {"class_path": "datamodules.inference.EmbeddedEngine", "init_args": {"kv_cache_tokens": 1024}},
            "tokenizer": "char:0123456789+-*=",
            "reward": "tests.datamodules.rewards.reward_functions.misbehave",
            "reward_options": {"deadline_s": 600},
            "batch_size": 4,
            "group_size": 2,
            "max_staleness": 0,
        },
    },
}

HOLDS_THE_INTERPRETER = """
import ctypes, sys
from pathlib import Path
from callbacks.hang_dump import install
install(Path(sys.argv[1]), 0)
print("ready", flush=True)
ctypes.PyDLL(None).sleep(120)  # a call in C that keeps the interpreter lock: no Python thread runs meanwhile
"""


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "never came true"
        time.sleep(0.1)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands; whatever they started is gone at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "ARBORIST_RUN_DIR")}
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=(tmp_path / "out").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                if member.is_running():
                    member.kill()
            process.wait(30)


def written(tmp_path: Path) -> str:
    return (tmp_path / "out").read_text()


@pytest.mark.slow
def test_a_run_that_hangs_is_asked_where(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    """Two ranks: one waits for a batch whose reward never comes, the other, in a collective, for the first one."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question": f"{i}=", "answer": "1"} | ({"reward": "hang"} if i == 2 else {}) for i in range(8)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    config = json.loads(json.dumps(RUN))
    config["trainer"]["devices"] = 2
    config["data"]["init_args"]["prompts"] = {
        "class_path": "datamodules.prompts.JsonlPrompts",
        "init_args": {"path": str(prompts), "template": "{question}", "shuffle": False},
    }
    (tmp_path / "hang.yaml").write_text(yaml.safe_dump(config))
    run_dir = tmp_path / "run"
    process = launch("-m", "app", "fit", "--config", str(tmp_path / "hang.yaml"), "--run_dir", str(run_dir))

    report = ""
    waiting = r"waits \d+\.\d s for reward '[^']+:3#[01]'"

    def hangs() -> bool:  # asks as often as it takes: asking is harmless, which is part of what is tested
        nonlocal report
        assert process.poll() is None, written(tmp_path)
        try:
            report = dump(process.pid).read_text()
        except NoSuchRun:
            return False
        signs = (r"\(index 2, admitted", r"'queued': [23]", "in collect", "in reduce")  # one worker: the order is luck
        return all(re.search(sign, report) for sign in signs) and len(re.findall(waiting, report)) >= 2

    wait_until(hangs)
    zero, one = re.split(r"#{8} rank 1, pid", report)
    assert "2 ranks on" in zero
    # rank 0: the main thread's stack, the pending table, the gate, the engine, and where the tasks wait
    assert "in collect" in zero and "in hand_out" in zero, zero
    assert re.search(r"the trainer waits for a batch: yes", zero)
    assert re.search(r"'[^']+' \(index 2, admitted at version 0\): \d+\.\d s, 0 of 2 done", zero), zero
    assert "at version 0; engine: {'alive': True" in zero
    assert re.search(r"[2-4] x\n(.*\n)*?.*rlvr\.py:\d+ in run\n.*in score", zero), zero
    assert re.search(r"0x[0-9a-f]{16} MainThread", zero) and "rollout-producer" in zero
    assert "fit, train, rank 0 of 2, step 0, policy version 0" in zero
    # rank 1: blocked in a collective on its main thread, and it still answers in full
    assert "in reduce" in one and "fit, train, rank 1 of 2" in one and "== end of this rank's answer ==" in one

    # the command says where it wrote; any process of the run will do, here the second rank
    (second,) = {int(path.name.split(".")[-2]) for path in (run_dir / "doctor").glob("rank1.*.txt")}
    asked = subprocess.run(
        [sys.executable, "-m", "app", "doctor", "--dump", str(second)], cwd=ROOT, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    path = Path(asked.stdout.strip())
    assert path.parent == run_dir / "doctor" and "######## rank 0" in path.read_text()
    assert process.poll() is None  # the run is as it was


@pytest.mark.slow
def test_a_call_that_holds_the_interpreter_lock_is_shown(
    tmp_path: Path, launch: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stacks come from a signal; whatever comes from a thread does not, and is waited for in vain."""
    process = launch("-c", HOLDS_THE_INTERPRETER, str(tmp_path / "run"))
    wait_until(lambda: "ready" in written(tmp_path) or process.poll() is not None)
    assert process.poll() is None, written(tmp_path)
    (answers,) = (tmp_path / "run" / "doctor").glob("rank*.txt")
    shown = "line 7 in <module>"
    monkeypatch.setattr(sys.modules[dump.__module__], "time", Clock(lambda: shown in answers.read_text()))
    report = dump(process.pid, deadline_s=60.0).read_text()
    assert "stacks only; nothing else within 60 s" in report and "holds the interpreter lock" in report
    assert re.search(r'File "<string>", line 7 in <module>', report), report


@pytest.mark.slow
def test_a_process_that_is_stopped_is_said_to_be(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("-c", HOLDS_THE_INTERPRETER, str(tmp_path / "run"))
    wait_until(lambda: "ready" in written(tmp_path) or process.poll() is not None)
    assert process.poll() is None, written(tmp_path)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    report = dump(process.pid, deadline_s=1.0).read_text()
    assert "no answer within 1 s; the process is stopped" in report


def test_a_source_that_hangs_or_fails_costs_its_own_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from callbacks import hang_dump

    monkeypatch.setattr(hang_dump, "_ANSWER_S", 0.5)
    dumper = hang_dump.Dumper(hang_dump.dump_path(tmp_path, 3), 3)
    try:
        dumper.sources |= {
            "first": lambda: "fine",
            "second": lambda: time.sleep(30) or "",
            "third": lambda: str(1 // 0),
        }
        os.kill(os.getpid(), hang_dump.SIGNAL)
        wait_until(lambda: hang_dump.END in dumper.path.read_text(), 30)
        text = dumper.path.read_text()
    finally:
        dumper.close()
    assert "first:\n  fine" in text and "third:\n  failed: ZeroDivisionError" in text
    assert "second:\n  no answer within 0.5 s: it waits for something that the run holds" in text
    assert "== rank 3, pid" in text and "test_doctor.py" in text


def test_who_asks_before_the_thread_runs_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from callbacks import hang_dump

    run = hang_dump.Dumper._run
    monkeypatch.setattr(hang_dump.Dumper, "_run", lambda self: (time.sleep(0.5), run(self)))
    dumper = hang_dump.Dumper(hang_dump.dump_path(tmp_path, 0), 0)
    try:
        os.kill(os.getpid(), hang_dump.SIGNAL)
        wait_until(lambda: hang_dump.END in dumper.path.read_text(), 30)
    finally:
        dumper.close()


def test_a_full_disk_costs_one_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The thread that answers goes on, and the next question finds room."""
    from callbacks import hang_dump

    path, full = hang_dump.dump_path(tmp_path, 0), 64 * 2**20
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(full - 100)  # sparse; no other file of this process is as large
    dumper = hang_dump.Dumper(path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    said: list[str] = []

    def complains() -> bool:
        said.append(capfd.readouterr().err)
        return f"{path} is not complete: OSError" in "".join(said)

    def answer() -> str:
        with path.open("rb") as file:
            file.seek(full - 100)
            return file.read().decode()

    try:
        os.kill(os.getpid(), hang_dump.SIGNAL)
        wait_until(complains, 30)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.kill(os.getpid(), hang_dump.SIGNAL)
        wait_until(lambda: hang_dump.END in answer(), 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        dumper.close()


def test_nobody_asked_leaves_no_file(tmp_path: Path) -> None:
    from callbacks import hang_dump

    dumper = hang_dump.Dumper(hang_dump.dump_path(tmp_path, 0), 0)
    assert dumper.path.exists()
    dumper.close()
    dumper.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_forced_end_leaves_no_empty_file(tmp_path: Path) -> None:
    """As a second Ctrl-C makes of a call that cannot be interrupted: nothing of `atexit` runs."""
    told = "from pathlib import Path; from app.interruption import force_end; from callbacks.hang_dump import install;"
    told += " print(install(Path('here'), 0).path.exists(), flush=True); force_end(7)"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", told],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (7, "True\n"), done.stderr
    assert list(Path(tmp_path, "here").iterdir()) == []


def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoSuchRun, match=r"there is no process 4194304"):
        dump(4_194_304)  # above the kernel's largest id
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--dump", str(sleeper.pid)])
        assert caught.value.code == 2
        assert "is none of an arborist run" in capsys.readouterr().err
        assert sleeper.poll() is None  # and it was sent no signal
    finally:
        sleeper.kill()
        sleeper.wait()


# ---- the machine


def test_this_machine_is_examined(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_DATA", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    printed = capsys.readouterr().out
    assert caught.value.code == 0, printed
    for what in ("python", "torch", "lightning", "transformers", "machine", "GPU", "SGLang", "loopback", "runs/"):
        assert re.search(rf"^(ok|note) +{what}", printed, re.MULTILINE), printed
    assert re.search(r"note +ARBORIST_DATA +not set", printed)


def test_what_is_wrong_is_said_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ARBORIST_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("ARBORIST_SGLANG_PYTHON", sys.executable)  # an interpreter without it
    with pytest.raises(SystemExit) as caught:
        main(["doctor"])
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert re.search(r"BAD +ARBORIST_DATA +.*nowhere is no directory; correct or unset it", printed)
    assert re.search(r"BAD +SGLang +.* has none .*build that environment again", printed)
    assert "2 of " in printed.splitlines()[-1]


def test_versions_are_judged_by_the_support_matrix() -> None:
    lightning = Requirement("lightning>=2.6.4")
    assert machine.judge(lightning, "2.6.6").level == "ok"
    assert machine.judge(lightning, "2.6.2").text == "2.6.2, wanted >=2.6.4: pip install 'lightning>=2.6.4'"
    assert machine.judge(lightning, None).level == "bad"
    assert machine.judge(Requirement("torch>=2.11"), "2.13.0+cpu").level == "ok"
    python, packages = machine.requirements()
    assert str(python.specifier) == ">=3.11"
    assert {"torch", "lightning", "transformers"} <= {one.name for one in packages}


def test_packages_for_scans_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU: what is not there is a note with the command that installs it."""
    found = {finding.what: finding for finding in machine.scan_kernels()}
    assert found.keys() == {"fla-core", "mamba-ssm"}
    for name, finding in found.items():
        if finding.level == "note":
            assert f"pip install '{name}>=" in finding.text and "torch's scan" in finding.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert found.keys() <= {finding.what for finding in machine._gpus()}


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        raise PermissionError("not for you")
        yield

    monkeypatch.setattr(machine, "_disk", broken)
    (finding,) = [one for one in machine.examine() if one.level == "bad"]
    assert finding.text == "could not be checked: PermissionError: not for you"
