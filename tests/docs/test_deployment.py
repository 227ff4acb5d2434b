"""Dockerfile and configs/cluster/skypilot.yaml agree with the files that say the same elsewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVER = ROOT / "datamodules" / "inference" / "sglang" / "server"


def instructions() -> list[tuple[str, str]]:
    """(name, what follows it) of every instruction, lines joined and comments gone."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def of(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def pins(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, flags=re.MULTILINE))


def installed_first() -> dict[str, str]:
    (given,) = (rest for rest in of("ARG") if rest.startswith("TORCH="))
    return pins(given.removeprefix("TORCH=").strip('"').replace(" ", "\n"))


def test_the_image_is_one_for_ever_and_nothing_runs_as_root() -> None:
    (image,) = of("FROM")
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image)
    assert of("USER")[-1] == "$USER_ID" and "USER_ID=1000" in of("ARG")
    names = [name for name, _ in instructions()]
    installs = [at for at, (name, rest) in enumerate(instructions()) if name == "RUN" and re.search("pip|make", rest)]
    assert len(installs) == 2 and min(installs) > names.index("USER")


def test_the_trainers_versions_are_those_that_the_project_is_developed_on() -> None:
    chosen = installed_first()
    assert chosen.keys() == {"torch", "transformers"}
    assert re.search(rf"^TORCH \?= torch=={re.escape(chosen['torch'])}$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    assert all(Version(version) in wanted[name] for name, version in chosen.items())


def test_servers_are_those_of_make_sglang_in_an_environment_of_their_own() -> None:
    frozen = (SERVER / "requirements.txt").read_text()
    wheels = pins((SERVER / "wheels.txt").read_text())
    assert wheels.keys() == {"sglang", "torchvision"}
    assert pins(frozen)["torch"] == installed_first()["torch"]
    (copied,) = (rest for rest in of("COPY") if "/tmp/server/" in rest)
    assert [(ROOT / path).parent for path in copied.split()[:-1]] == [SERVER, SERVER]
    (install,) = (rest for rest in of("RUN") if "wheels.txt" in rest)
    # What it leaves out of the frozen packages is there to be left out, and nothing else goes with it.
    (left_out,) = re.findall(r"grep -v '\^([^']+)'", install)
    assert len([line for line in frozen.splitlines() if line.startswith(left_out)]) == 1
    assert re.search(r"-c /tmp/server/constraints\.txt -r /tmp/server/wheels\.txt$", install)
    assert "ARBORIST_SGLANG_PYTHON=/opt/sglang/bin/python" in of("ENV") and "python3 -m venv /opt/sglang" in install


def test_nothing_that_git_ignores_is_sent_to_the_build() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert {".git", ".venv*", "runs"} <= ignored
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {path.split("/")[0] for path in tracked}
    assert not {one for one in ignored if one in tops}, "what the image needs"


def test_skypilot_starts_what_slurm_starts() -> None:
    path = ROOT / "configs" / "cluster" / "skypilot.yaml"
    task = yaml.safe_load(path.read_text())
    assert path.read_text().count("\n") <= 40
    assert task.keys() == {"name", "num_nodes", "workdir", "resources", "envs", "setup", "run"}
    assert task["setup"] == "make .venv/.installed" and re.search(
        r"^STAMP := \$\(VENV\)/\.installed$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
    flags = [re.findall(r"(?<= )--[\w.-]+", text) for text in (task["run"], path.with_name("slurm.sbatch").read_text())]
    of_torchrun_on = [some[some.index("--nnodes") : some.index("--trainer.devices") + 1] for some in flags]
    assert of_torchrun_on[0] == of_torchrun_on[1]
    given = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_TASK_ID"}
    assert set(re.findall(r"\$(\w+)", task["run"])) == given | task["envs"].keys()
