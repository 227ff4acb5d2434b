"""Whether this machine can run Arborist.

Promises: versions are compared with pyproject.toml, so there is one support matrix; checks look and measure, and none
changes anything; one that fails itself is a finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from app.cli.doctor.findings import Finding
from app.tree import SCAN_PACKAGES, triton_lacks
from datamodules.files.data_files import VARIABLE as DATA_VARIABLE

_ROOT = Path(__file__).resolve().parents[3]
_GIB = 2**30


def examine() -> Iterator[Finding]:
    """All checks; one that fails itself is a finding."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _processor,
        _gpus,
        _servers,
        _shared_memory,
        _loopback,
        _files,
        _disk,
        _data,
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding("bad", check.__name__.strip("_"), f"could not be checked: {type(error).__name__}: {error}")


def requirements(pyproject: Path = _ROOT / "pyproject.toml") -> tuple[Requirement, list[Requirement]]:
    """The supported Python, as a requirement of that name, and the packages that are needed."""
    project = tomllib.loads(pyproject.read_text())["project"]
    packages = [Requirement(text) for text in project["dependencies"]]
    return Requirement(f"python{project['requires-python']}"), packages


def judge(wanted: Requirement, found: str | None) -> Finding:
    """Whether a version, or None for a package that is not there, is a supported one."""
    name, matrix = wanted.name, str(wanted.specifier) or "any"
    if found is None:
        return Finding("bad", name, f"not installed; wanted {matrix}: pip install '{wanted}'")
    if not wanted.specifier.contains(found, prereleases=True):
        return Finding("bad", name, f"{found}, wanted {matrix}: pip install '{wanted}'")
    return Finding("ok", name, f"{found} (wanted {matrix})")


def _python() -> Iterator[Finding]:
    yield judge(requirements()[0], platform.python_version())
    inside = sys.prefix != sys.base_prefix
    yield Finding(
        "ok" if inside else "note", "environment", sys.prefix if inside else f"{sys.prefix}, not a virtual one"
    )


def _packages() -> Iterator[Finding]:
    for wanted in requirements()[1]:
        try:
            found: str | None = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        yield judge(wanted, found)


def _processor() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{cores} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB memory free"
    yield Finding("ok" if memory.available > 2 * _GIB else "note", "machine", text)


def _gpus() -> Iterator[Finding]:
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if built is None else f"torch is built for {built} and sees none"
        yield Finding("note", "GPU", f"none ({why}): everything runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", f"GPU {index}", f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free")
    if (lacks := triton_lacks()) is not None:
        yield Finding("note", "Triton", f"lacks {lacks}: its kernels, of attention and logits, are left out")
    if importlib.util.find_spec("flash_attn") is None:
        yield Finding(
            "note", "flash-attn", "not installed; torch's and Triton's kernels are used (pip install flash-attn)"
        )
    else:
        yield Finding("ok", "flash-attn", importlib.metadata.version("flash_attn"))
    yield from scan_kernels()


def scan_kernels() -> Iterator[Finding]:
    """Packages whose kernels compute the scans of hybrid models, where there is a GPU."""
    for package, serves in (("fla-core", "gated delta rules"), ("mamba-ssm", "Mamba-2")):
        try:
            for one in (one for one in SCAN_PACKAGES.values() if one.name == package):
                one.find()
        except ValueError as error:
            yield Finding("note", package, f"{serves} of hybrid models run on torch's scan: states='fla' {error}")
        else:
            yield Finding("ok", package, f"{importlib.metadata.version(package)}, for {serves} of hybrid models")


def _servers() -> Iterator[Finding]:
    from datamodules.inference.sglang.launcher import NoServerEnvironment, server_python

    try:
        python = server_python()
    except NoServerEnvironment as error:
        yield Finding("note", "SGLang", f"{error}; EmbeddedEngine works without")
        return
    ask = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    asked = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=60)
    if asked.returncode != 0:
        last = asked.stderr.strip().rpartition("\n")[2]
        yield Finding("bad", "SGLang", f"{python} has none ({last}): build that environment again")
        return
    yield Finding("ok", "SGLang", f"{asked.stdout.strip()} in {python}")


def _shared_memory() -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding("note", "/dev/shm", "not there (not Linux?); servers and several ranks may need it")
        return
    free = shutil.disk_usage(path).free
    enough = free >= _GIB
    remedy = "" if enough else "; SGLang servers and NCCL need about 1 GiB (containers: --shm-size=8g)"
    yield Finding("ok" if enough else "note", "/dev/shm", f"{free / _GIB:.1f} GiB free{remedy}")


def _loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5.0) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"?")
                    assert accepted.recv(1) == b"?"
    except OSError as error:
        yield Finding(
            "bad", "loopback", f"{error}; ranks and servers talk over 127.0.0.1: look at firewall and sandbox"
        )
        return
    yield Finding("ok", "loopback", "ports can be opened and reached on 127.0.0.1")


def _files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= 4096 or soft == resource.RLIM_INFINITY
    remedy = "" if enough else "; hundreds of concurrent requests need more: ulimit -n 65536"
    yield Finding("ok" if enough else "note", "open files", f"at most {soft}{remedy}")


def _disk() -> Iterator[Finding]:
    runs = Path("runs")
    place = runs if runs.is_dir() else Path()
    free = shutil.disk_usage(place).free
    where = f"{free / _GIB:.1f} GiB free at {place.absolute()}"
    if not os.access(place, os.W_OK):
        yield Finding(
            "bad", "runs/", f"{place.absolute()} is not writable; start from another directory, or set --run_dir"
        )
    elif free < _GIB:
        yield Finding(
            "bad", "runs/", f"{where}; checkpoints need several copies of the model: free some, or set --run_dir"
        )
    else:
        yield Finding("ok" if free >= 10 * _GIB else "note", "runs/", where)


def _data() -> Iterator[Finding]:
    value = os.environ.get(DATA_VARIABLE)
    if value is None:
        yield Finding("note", DATA_VARIABLE, "not set; configs on imported data need it (arborist data --help)")
    elif not Path(value).expanduser().is_dir():
        yield Finding("bad", DATA_VARIABLE, f"{value} is no directory; correct or unset it")
    else:
        yield Finding("ok", DATA_VARIABLE, value)
