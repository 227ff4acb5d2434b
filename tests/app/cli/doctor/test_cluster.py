"""`arborist doctor --cluster`: real jobs of two processes, under torchrun and with SLURM's variables; what is wrong."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from app.cli import main
from app.cli.doctor import cluster
from tests.app.cli.doctor import cluster_jobs
from tests.app.cli.doctor.cluster_jobs import HIDDEN
from tests.helpers.ports import free_port
from tests.helpers.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S = 240.0


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-m", *command], env=environment, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output = process.communicate(timeout=DEADLINE_S)[0]
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.slow
def test_two_ranks_of_torchrun_are_examined(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    torchrun = [
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    code, printed = ended(start([*torchrun, "-m", "app", "doctor", "--cluster", "--folder", str(folder)]))
    assert code == 0, printed
    assert re.search(rf"^ok +ranks +all 2 came: 2 on {re.escape(socket.gethostname())}$", printed, re.MULTILINE), (
        printed
    )
    assert re.search(r"^ok +torch +\S+ on every rank$", printed, re.MULTILINE)
    assert re.search(r"^ok +folder +.*runs: what a rank writes, all see, within ", printed, re.MULTILINE)
    found = re.search(
        r"^ok +clocks +at most (\S+) s from rank 0's \(rank 1, known to (\S+) s\)$", printed, re.MULTILINE
    )
    assert found and abs(float(found[1])) <= float(found[2]) + 1e-3  # one clock, read between a question and its answer
    found = re.search(r"(ok|note) +sums by gloo +64 MiB summed over 2 ranks in (\S+) ms, (\S+) GB/s", printed)
    assert found and float(found[3]) == pytest.approx(2**26 / float(found[2]) / 1e6, rel=0.02)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_tasks_of_slurm_whose_folders_are_two_and_whose_server_is_not_there(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    nobody = free_port()
    shared = ["--servers", f"http://127.0.0.1:{nobody}", "--deadline", "10"]
    options = [["--folder", str(tmp_path / str(rank)), *shared] for rank in range(2)]
    (code, printed), (other, silent) = two_ranks.run(cluster_jobs.as_slurm_tasks, port=free_port(), options=options)
    assert (code, other) == (1, 1) and "BAD" not in silent, printed + silent
    assert re.search(r"^BAD +folder +.*: rank 1 does not see what rank 0 wrote; .*--run_dir\)$", printed, re.MULTILINE)
    assert re.search(rf"^BAD +server +.*127\.0\.0\.1:{nobody}.*arborist serve", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("2 of ")
    assert not list(tmp_path.glob("*/.doctor*"))


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(two_ranks: RankPool, tmp_path: Path) -> None:
    options = [["--folder", str(tmp_path), "--deadline", "1"], None]
    (code, printed), _ = two_ranks.run(cluster_jobs.as_slurm_tasks, port=free_port(), options=options)
    assert code == 1
    assert re.search(
        r"^BAD +ranks +1 of 2 came within 1 s \(1 on .*\), missing: rank 1; its own output", printed, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cluster"], "this process is no rank of a job: start it as a run is started, torchrun"),
        (["--dump", "1", "--servers", "http://127.0.0.1:1"], "--servers has no effect with --dump"),
        (["--folder", "runs"], "--folder has no effect without --cluster"),
        (["--dump", "1", "--folder", "runs"], "--folder has no effect without --cluster"),
        (["--deadline", "5"], "--deadline has no effect without --cluster, --servers or --dump"),
        (["--cluster", "--dump", "1"], "--cluster has no effect with --dump"),
        (["--deadline", "0"], "--deadline: must be above 0 seconds, got 0"),
    ],
)
def test_mistakes(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *options])
    assert caught.value.code == 2 and said in capsys.readouterr().err


def test_options_of_srun_that_runs_refuse_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("SLURM_NTASKS", "2"), ("SLURM_JOB_NAME", "doctor"), ("SLURM_PROCID", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--cluster"])
    assert caught.value.code == 2 and "--ntasks-per-node=2" in capsys.readouterr().err


# ---- what each says of itself


def test_what_differs_is_named_by_rank() -> None:
    assert cluster._alike("torch", {0: "2.13.0", 1: "2.13.0"}, "bad", "x").level == "ok"
    found = {0: "2.13.0", 1: "2.12.0", 2: "2.13.0"}
    finding = cluster._alike("torch", found, "bad", "install the same everywhere")
    assert finding.text == "2.13.0 on rank 0, 2; 2.12.0 on rank 1: install the same everywhere"


def facts(host: str, torch_version: str = "2.13.0") -> dict[str, object]:
    return {"host": host, "versions": {"torch": torch_version}, "device": "CPU"}


def test_ranks_keep_their_numbers_where_one_is_missing() -> None:
    came, versions, _ = cluster._of_facts({0: facts("a", "2.9.0"), 2: facts("b", "2.10.0")}, [1], 5.0)
    assert came.text.startswith("2 of 3 came within 5 s (1 on a, 1 on b), missing: rank 1; ")
    assert versions.text == "2.9.0 on rank 0; 2.10.0 on rank 2: install the same everywhere"


def test_ranks_of_a_host_are_counted_together_in_any_order() -> None:
    came, *_ = cluster._of_facts({rank: facts("abab"[rank]) for rank in range(4)}, [], 5.0)
    assert came.text == "all 4 came: 2 on a, 2 on b"


@pytest.mark.parametrize(("seen", "index"), [(1, 0), (2, 1), (8, 3)])
def test_a_rank_takes_a_gpu_that_it_sees(seen: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers hand a task one GPU or all of its machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cluster._gpu(LightningEnvironment()) == torch.device("cuda", index)


# ---- what they do together

SHORT = timedelta(seconds=0.3)


def place(rank: int, size: int) -> LightningEnvironment:
    made = LightningEnvironment()
    made.set_world_size(size)
    made.set_global_rank(rank)
    return made


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_a_folder_that_is_a_file_is_a_finding(tmp_path: Path, store: dist.Store) -> None:
    (tmp_path / "file").write_text("mine")
    (finding,) = cluster._folder(store, 0, 1, tmp_path / "file", SHORT)
    assert finding.level == "bad" and "/file: rank 0 cannot write (" in finding.text
    assert (tmp_path / "file").read_text() == "mine"


def test_a_rank_that_says_nothing_of_the_folder_is_named_and_nobody_waits_for_it(
    tmp_path: Path, store: dist.Store
) -> None:
    store.set("wrote/1", "rank 1 cannot write (No space left on device)")
    (finding,) = cluster._together(place(0, 3), store, tmp_path, SHORT)  # rank 2 hangs
    assert finding.level == "bad" and ": rank 1 cannot write (No space left on device); rank 2 did" in finding.text
    assert "rank 2 did not answer about the folder (it ended, or its file system hangs)" in finding.text
    assert "clocks and sums, which need all ranks, were not measured" in finding.text
    assert store.get("tidy") == b"no" and not list(tmp_path.iterdir())


def test_a_rank_ends_with_rank_0s_code_where_another_did_not_answer(
    tmp_path: Path, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in {"all": "yes", "token": "abc", "tidy": "no", "code": "7"}.items():
        store.set(key, value)
    (tmp_path / ".doctor-abc-0").write_text("abc")
    assert cluster._follow(place(1, 3), store, tmp_path, SHORT) == 7  # and no network without rank 2
    assert store.get("wrote/1") == b"" and store.check(["bye/1"])
    assert [path.name for path in tmp_path.iterdir()] == [".doctor-abc-0"] and capsys.readouterr().err == ""


@pytest.mark.parametrize("until", [[], ["all"], ["all", "token"], ["all", "token", "tidy"]])
def test_a_rank_whose_rank_0_is_gone_ends_with_code_1(
    until: list[str], tmp_path: Path, store: dist.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in until:
        store.set(key, {"all": "yes", "tidy": "no"}.get(key, "abc"))
    assert cluster._follow(place(1, 2), store, tmp_path, SHORT) == 1
    assert "rank 1: rank 0 does not answer (" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- servers


@contextmanager
def server(together: threading.Barrier) -> Iterator[str]:
    """Answers when all that share `together` were asked."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                together.wait()
            except threading.BrokenBarrierError:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}"
    finally:
        serving.shutdown()
        serving.server_close()


def test_servers_are_asked_all_at_once() -> None:
    """One after another, the deadlines of those that hang would add up, beyond what the other ranks wait."""
    together = threading.Barrier(6, timeout=20.0)
    with ExitStack() as stack:
        urls = [stack.enter_context(server(together)) for _ in range(6)]
        findings = list(cluster.asked_servers([*urls, "no address"], 60.0))
    assert [finding.level for finding in findings] == 6 * ["ok"] + ["bad"], findings
    assert [finding.text.split()[0] for finding in findings[:-1]] == urls


def test_one_machine_asks_servers_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job: who has one machine asks them before a run waits for them."""
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    with server(threading.Barrier(1)) as url:
        nobody = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--servers", url, nobody, "--deadline", "20"])
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert re.search(rf"^ok +server +{url} answers in [0-9.]+ ms$", printed, re.MULTILINE)
    assert re.search(rf"^BAD +server +{nobody}/health: .*; start it \(arborist serve\)", printed, re.MULTILINE)
