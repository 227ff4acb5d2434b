"""Checkpoint directories: complete or absent, the moment's values, any number of ranks, nothing unsafe."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from app.cli.errors import users_mistake
from app.strategies.checkpoint import directories
from app.strategies.checkpoint.checkpoints import CheckpointError, check, pack, unpack
from app.strategies.manifest import Written, manifest, read_manifest
from app.strategies.pieces import CheckpointMismatch, Piece, load_pieces, load_whole
from tests.app.strategies import toy_model as toy
from tests.app.strategies import toy_module
from tests.app.strategies.checkpoint import checkpoint_jobs as jobs
from tests.helpers.rank_pool import IMPORTED, RankPool

START = 170.0  # seconds: eight processes start on few cores


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_on_four_ranks_continues_on_any_number(
    one_rank: RankPool,
    two_ranks: RankPool,
    four_ranks: RankPool,
    eight_ranks: RankPool,
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    path = tmp_path / "four.ckpt"
    whole = four_ranks.run(jobs.train_and_save, START, path=path, dtype=dtype, steps=3)[0]  # took a fourth step
    for pool in (one_rank, two_ranks, four_ranks, eight_ranks):
        for result in pool.run(jobs.load_and_train, START, path=path, dtype=dtype, first=3, steps=1):
            difference = _largest_difference(result, whole)
            # bfloat16 gradients of one sample are rounded before they are added in another order
            assert difference <= (1e-2 * toy.LEARNING_RATE if dtype == torch.float32 else 2e-2)
            if pool is four_ranks:
                assert difference == 0.0


def test_values_of_the_moment_in_order(two_ranks: RankPool, tmp_path: Path) -> None:
    for result in two_ranks.run(jobs.snapshots, directory=tmp_path):
        assert result["names"] == ["b.ckpt", "c.ckpt"]
        assert result["step"] == 3
        assert torch.equal(result["weight"], torch.arange(20.0).view(5, 4) + 200.0)


def test_the_writer_s_thread_is_on_the_rank_s_own_device(one_rank: RankPool, tmp_path: Path) -> None:
    """torch's writer waits for the stream of the thread's device, and that is the first one unless it is said."""
    [found] = one_rank.run(jobs.devices_of_the_thread, directory=tmp_path, devices=["cuda:3", "cpu"])
    assert found == [[("checkpoint-writer", "cuda:3")], []]
    assert one_rank.run(toy_module.device_of_the_writer) == ["cpu"]


def test_a_failed_write_is_told_and_costs_nothing(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in two_ranks.run(jobs.blocked, directory=tmp_path):
        assert "a checkpoint was not written" in message and "file" in message
    assert unpack(tmp_path / "good.ckpt") == {}


def test_a_full_disk_is_told_with_numbers_and_leaves_nothing(one_rank: RankPool, tmp_path: Path) -> None:
    [message] = one_rank.run(jobs.too_large, directory=tmp_path)
    assert re.search(
        r"big\.ckpt does not fit: it needs 4\.0 MB, \d+\.\d MB are free \(.*\)\. Free space there, keep", message
    )
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"] and unpack(tmp_path / "good.ckpt") == {}


def test_a_rank_that_does_not_come_is_waited_for_by_name(two_ranks: RankPool, tmp_path: Path) -> None:
    message, _ = two_ranks.run(jobs.absent, directory=tmp_path)
    assert re.search(r"alone\.ckpt: not all ranks came to begin it within 2 s", message), message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("same_name", [False, True])
def test_ranks_that_chose_different_checkpoints_do_not_go_on(
    two_ranks: RankPool, tmp_path: Path, same_name: bool
) -> None:
    """By their names before they are read, by their steps behind that."""
    has = ("last.ckpt of step 0", "last.ckpt of step 1") if same_name else ("last.ckpt", "last-v1.ckpt")
    for message in two_ranks.run(jobs.apart, directory=tmp_path, same_name=same_name):
        assert message.startswith("ckpt_path: the checkpoints that are loaded differ between ranks: rank 0 has")
        assert f"'{has[0]}' where rank 1 has '{has[1]}'" in message and "NAME.ckpt in --ckpt_path" in message


def test_only_checkpoints_are_deleted(one_rank: RankPool, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    [message] = one_rank.run(jobs.removed, path=tmp_path / "mine")
    assert "mine was to be deleted" in message and (tmp_path / "mine" / "file").exists()


def _process(pid: int, seconds: float = 0.0) -> str:
    """As `this_process` of that one, `seconds` after it started."""
    machine, _, started = directories.this_process().split("-")
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        ticks = int(stat.read_text().rpartition(")")[2].split()[19]) + seconds * os.sysconf("SC_CLK_TCK")
        assert started.startswith("t")
        return f"{machine}-{pid}-t{ticks:.0f}"
    return f"{machine}-{pid}-{psutil.Process(pid).create_time() + seconds:.0f}"


@pytest.mark.parametrize("step", [0.0, 60.0])
def test_what_others_still_write_stays(step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the machine's clock was set, which moves the seconds at which processes began."""
    ours = directories.this_process()
    assert ours == _process(os.getpid())
    gone, reborn = ours.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"), _process(os.getpid(), 1000)
    elsewhere = "0123abcd-1-1"
    child = subprocess.Popen(["sleep", "60"])
    try:
        living = _process(child.pid)
        if step:
            began = psutil.Process.create_time
            monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + step)
        made = {
            name: directories.hidden(tmp_path / f"{name}.ckpt", "partial", process)
            for name, process in (("ours", ours), ("gone", gone), ("reborn", reborn), ("living", living))
        }
        made |= {age: directories.hidden(tmp_path / age, "replaced", elsewhere) for age in ("new", "old")}
        made["ancient"] = tmp_path / ".partial-0123456789ab"  # of an older version
        for path in made.values():
            path.mkdir()
            (path / "shard").touch()
        for path in (made["old"], made["ancient"]):
            for file in (path / "shard", path):
                os.utime(file, (1.0, 1.0))
        directories.clean(tmp_path, ours)
        assert {name for name, path in made.items() if path.exists()} == {"living", "new"}
    finally:
        child.kill()
        child.wait()


_ELSEWHERE = """
import sys
from pathlib import Path
from app.strategies.checkpoint import directories
directories.hidden(Path(sys.argv[1]) / "theirs.ckpt", "partial", directories.this_process()).mkdir()
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_container_of_the_same_host_name_writes_stays(tmp_path: Path) -> None:
    """Its writer lives, under a number that is another process's here."""
    apart = ["unshare", "-Urpf", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system makes no namespaces for its users")
    command = [*apart, sys.executable, "-c", _ELSEWHERE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, **pipes) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "begun\n"
        directories.clean(tmp_path, directories.this_process())
        left = list(tmp_path.iterdir())
        writer.communicate("enough")
    assert len(left) == 1


def test_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    ours, theirs = context.Pipe()
    process = context.Process(target=jobs.save_forever, args=(tmp_path, theirs), daemon=True)
    process.start()
    theirs.close()
    while ours.recv() < 3:
        pass
    directory = tmp_path / "checkpoints"
    end = time.monotonic() + 60.0
    while not list(directory.glob(".partial-*")) and time.monotonic() < end:
        pass
    process.kill()
    process.join()
    step = unpack(directory / "last.ckpt")["step"]
    [weight] = load_whole(directory / "last.ckpt", lambda name: True).values()
    assert step >= 3 and bool((weight == step).all()) and len(weight) == 1 << 20


class TestBadCheckpoints:
    """What cannot be what was written is refused in one line, with the file's name."""

    @pytest.fixture(scope="class")
    def written(self, one_rank: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory = tmp_path_factory.mktemp("written")
        one_rank.run(jobs.snapshots, directory=directory)
        return directory / "b.ckpt"

    @pytest.fixture
    def path(self, written: Path, tmp_path: Path) -> Path:
        """A copy of one's own, to do harm to."""
        return Path(shutil.copytree(written, tmp_path / "b.ckpt"))

    def refused(self, path: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match) as caught:
            unpack(path)
        assert "\n" not in str(caught.value) and users_mistake(caught.value) is caught.value
        assert len(str(caught.value)) < 600

    def test_cut_short(self, path: Path) -> None:
        [shard] = path.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-4])
        self.refused(path, rf"{shard.name} has \d+ bytes, \d+ were written")

    def test_missing_file(self, path: Path) -> None:
        next(path.glob("*.safetensors")).unlink()
        self.refused(path, r"safetensors is missing")

    @pytest.mark.parametrize(("name", "at"), [("*.safetensors", 0), ("*.safetensors", -3), ("trainer.pt", 200)])
    def test_other_bytes(self, path: Path, name: str, at: int) -> None:
        [file] = path.glob(name)
        data = bytearray(file.read_bytes())
        data[at] ^= 0xFF
        file.write_bytes(data)
        self.refused(path, f"{file.name} does not hold the bytes that were written.* copy the whole directory again")

    def test_a_file_of_another_checkpoint(self, path: Path) -> None:
        [shard] = path.glob("*.safetensors")
        (path / "shard-00009-model-00001-of-00001.safetensors").write_bytes(shard.read_bytes())
        self.refused(path, "shard-00009-.* is of another checkpoint")

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("", "is no JSON"),
            ('{"format": 2, "files": {"trai', "is no JSON"),
            ("[" * 100_000, "is no JSON"),
            ("7", "has no format"),
            ('{"files": {}}', "has no format"),
            ('{"format": 3, "files": {}}', "has format 3, this version reads 1 and 2"),
            ('{"format": 2, "files": {}}', "names no files"),
            ('{"format": 2, "files": {"a": "b"}}', "describes no file with 'a'"),
            ('{"format": 2, "files": {"../trainer.pt": {"bytes": 1, "sha256": ""}}}', "describes no file with"),
        ],
    )
    def test_manifest(self, path: Path, text: str, match: str) -> None:
        (path / "manifest.json").write_text(text)
        self.refused(path, match)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "no checkpoint of DTAStrategy")

    @pytest.mark.parametrize("value", [len, [1, 2]])
    def test_another_pickle_with_the_right_hash(self, path: Path, value: object) -> None:
        torch.save(value, path / "trainer.pt")
        files = read_manifest(path) | {"trainer.pt": Written.of((path / "trainer.pt").read_bytes())}
        (path / "manifest.json").write_bytes(manifest(files, 1))
        self.refused(path, r"trainer\.pt (cannot be read|holds no dictionary)")

    def test_an_older_version_s_is_read_with_a_note(self, path: Path) -> None:
        sizes = {name: written.size for name, written in read_manifest(path).items()}
        (path / "manifest.json").write_text(json.dumps({"format": 1, "ranks": 1, "files": sizes}))
        with pytest.warns(UserWarning, match="its bytes are not checked"):
            assert unpack(path)["step"] == 3
        [shard] = path.glob("*.safetensors")
        shard.write_bytes(b"\xff" * shard.stat().st_size)
        with pytest.raises(CheckpointError, match=r"shards in .* cannot be read") as caught:
            load_whole(path, lambda name: True)
        assert "\n" not in str(caught.value)

    def test_ranks_share_the_checking(self, path: Path) -> None:
        [shard] = path.glob("*.safetensors")
        shard.write_bytes(bytes(shard.stat().st_size))
        check(path, rank=1, ranks=2)  # trainer.pt, the other of the two files
        with pytest.raises(CheckpointError, match=shard.name):
            check(path, rank=0, ranks=2)

    def test_another_model(self, path: Path) -> None:
        for name, shape, message in (
            ("model/weight", (5, 5), r"'model/weight' has shape \(5, 4\) in the checkpoint and \(5, 5\)"),
            ("model/other", (5, 4), "holds no 'model/other'"),
        ):
            with pytest.raises(CheckpointMismatch, match=message):
                load_pieces({name: Piece(torch.zeros(shape), (0, 0), shape)}, path)


def test_what_could_not_be_loaded_safely_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"\['hyper_parameters'\]"):
        pack({"step": 1, "hyper_parameters": {"when": datetime.UTC}})
