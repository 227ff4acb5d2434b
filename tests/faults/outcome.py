"""Where the soak's runs happen, and what it says about each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.servers import Servers


@dataclass
class Place:
    """Where runs happen.

    Attributes:
        directory: for their files; one below it for each run.
        servers: two running ones; None where only faults without servers are asked for.
    """

    directory: Path
    servers: Servers | None = None
    runs: int = 0

    def fresh(self, name: str) -> Path:
        self.runs += 1
        return self.directory / f"{self.runs:03d}_{name}"

    def pids(self) -> set[int]:
        processes = [] if self.servers is None else self.servers.processes
        return {process.pid for process in processes if process.pid is not None}


@dataclass
class Outcome:
    """One run with a fault.

    Attributes:
        moment_s: seconds from the first step's end to the fault.
        after_steps: optimizer steps done by then.
        steps: all in all.
        stall_s: longest time between two optimizer steps from the fault on.
        healed_s: from the fault until everything worked again.
        accounts: of all groups; see `soak_fit.accounts`.
        wrong: what must not be; empty when the run is as it should.
    """

    fault: str
    moment_s: float
    after_steps: int = 0
    steps: int = 0
    stall_s: float = 0.0
    healed_s: float = 0.0
    accounts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)
