"""What an episode of an agent takes, but for what its model computes: in a program of its own, and in a fork.

    python -m benchmarks.rollouts.agents                   # two minutes; writes agents.json and .md
    python -m benchmarks.rollouts.agents --quick --out DIR

Each row is a function that is written with a package, makes its client and one call, and answers with the reply. Who
is called is a process that has the reply at once, and whose seconds are not counted. Episodes of both kinds by turns,
two at a time; seconds an episode, medians (least-most) of the repeats, CPU seconds of all processes that had a part in
it. The nursery's own imports, once a fit, have a column of their own. Packages that are not installed are left out, and
said.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import importlib
import importlib.util
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from app.clients import KEYS
from benchmarks.common.measure import spread
from benchmarks.common.records import write_json
from datamodules.processes.calls import ProcessCalls
from datamodules.processes.environment import InEnvironment
from datamodules.processes.forks import Forks
from datamodules.prompts import Prompt
from datamodules.workflows.gateway.agents import OURS, VARIABLES, written_with

_CHAT = [{"role": "user", "content": "?"}]
AGENTS = {
    "nothing": ("", "task"),
    "openai": ("import openai", f"openai.OpenAI().chat.completions.create(model='m', messages={_CHAT})"),
    "openai, Responses": ("import openai", "openai.OpenAI().responses.create(model='m', input='?')"),
    "anthropic": (
        "import anthropic",
        f"anthropic.Anthropic().messages.create(model='m', max_tokens=9, messages={_CHAT})",
    ),
    "openai-agents": ("import agents", "agents.Runner.run_sync(agents.Agent(name='a', model='gpt-4.1'), '?')"),
    "LangGraph": (
        "from langchain_openai import ChatOpenAI\nfrom langgraph.prebuilt import create_react_agent",
        "create_react_agent(ChatOpenAI(model='m'), []).invoke({'messages': [('user', '?')]})",
    ),
    "litellm": ("import litellm", f"litellm.completion(model='openai/m', messages={_CHAT})"),
    "pydantic-ai": ("import pydantic_ai", "pydantic_ai.Agent('openai-chat:m').run_sync('?')"),
}
"""By name, the imports of a module, and what its function does before it answers."""
_COMPLETION = {
    **{"id": "c", "object": "chat.completion", "created": 1, "model": "m"},
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_RESPONSE = {
    **{"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "tools": []},
    **{"parallel_tool_calls": True, "tool_choice": "auto"},
    "output": [
        {
            **{"id": "o", "type": "message", "role": "assistant", "status": "completed"},
            "content": [{"type": "output_text", "text": "4", "annotations": []}],
        }
    ],
    "usage": {
        **{"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    },
}
_MESSAGE = {
    **{"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"},
    **{"stop_sequence": None, "content": [{"type": "text", "text": "4"}]},
    "usage": {"input_tokens": 1, "output_tokens": 1},
}
_REPLIES = {"/v1/chat/completions": _COMPLETION, "/v1/responses": _RESPONSE, "/v1/messages": _MESSAGE}
_AT_ONCE = 2
_DEADLINE_S = 120.0
_TASK = Prompt(id="task", text="?")
_GIVEN = {**dict.fromkeys(KEYS, "none"), "OPENAI_AGENTS_DISABLE_TRACING": "1"}
_SETTLED_S = 0.3  # a nursery takes leave of its forks every tenth of a second


@contextmanager
def provider() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """A process that answers, and the environment in which agents find it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(_REPLIES[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            for name, value in {"content-type": "application/json", "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.socket.close()
    assert process.pid is not None
    try:
        addresses = {
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{address}/v1"),
            "ANTHROPIC_BASE_URL": address,
        }
        yield psutil.Process(process.pid), {**_GIVEN, **addresses}
    finally:
        process.kill()
        process.join(_DEADLINE_S)


async def row(
    name: str, folder: Path, other: psutil.Process, given: dict[str, str], episodes: int, repeats: int
) -> dict[str, Any]:
    """Lists of CPU and wall seconds an episode, "alone" and "forked", and what the first fork took ("first").

    Args:
        other: the process that is called, whose CPU seconds do not count.
        given: environment variables of an agent.
    """
    module = f"agent_{re.sub('[^a-z]+', '_', name.lower())}"
    imports, call = AGENTS[name]
    (folder / f"{module}.py").write_text(f"{imports}\n\ndef answer(task):\n    {call}\n    return 1.0\n")
    function = importlib.import_module(module).answer
    forks = Forks(written_with(function), VARIABLES, ours=OURS)
    kinds = {
        "alone": ProcessCalls({"agent": InEnvironment(function)}, _AT_ONCE, once=True),
        "forked": ProcessCalls({"agent": InEnvironment(function)}, _AT_ONCE, once=True, forks=forks),
    }
    found: dict[str, Any] = {kind: {"cpu": [], "wall": []} for kind in kinds}
    try:
        found["first"] = (await _played(kinds["forked"], other, given, 1))["wall"]
        for repeat in range(repeats):
            for kind in (kinds, reversed(kinds))[repeat % 2]:
                for which, seconds in (await _played(kinds[kind], other, given, episodes)).items():
                    found[kind][which].append(seconds / episodes)
    finally:
        for one in kinds.values():
            one.stop()
    return found


async def _played(calls: ProcessCalls, other: psutil.Process, given: dict[str, str], episodes: int) -> dict[str, float]:
    cpu, begin = _cpu_seconds(other), time.perf_counter()
    await asyncio.gather(*(calls.call("agent", (given, _TASK), {}, _DEADLINE_S) for _ in range(episodes)))
    wall = time.perf_counter() - begin
    await asyncio.sleep(_SETTLED_S)
    return {"cpu": _cpu_seconds(other) - cpu, "wall": wall}


def _cpu_seconds(other: psutil.Process) -> float:
    """Of this process, and of all those below it that run, or were taken leave of, but one."""
    own, ended = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return found + sum(sum(one.cpu_times()[:4]) for one in psutil.Process().children(recursive=True) if one != other)


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What an episode of an agent takes",
        "",
        f"`{report['command']}`, {report['date']}, on {report['hardware']}: {report['episodes']} episodes of a function"
        f" that makes one call, answered at once, {_AT_ONCE} at a time; seconds each, medians (least-most) of"
        f" {report['repeats']}.",
        "",
        "| written with | CPU, a program | CPU, forked | times less | wall, a program | wall, forked | first |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in report["rows"].items():
        cells = {(kind, which): spread(one[kind][which]) for which in ("cpu", "wall") for kind in ("alone", "forked")}
        said = [f"{cell['median']:.3f} ({cell['min']:.3f}-{cell['max']:.3f})" for cell in cells.values()]
        less = cells["alone", "cpu"]["median"] / cells["forked", "cpu"]["median"]
        lines.append(f"| {' | '.join([name, *said[:2], f'{less:.0f}', *said[2:], format(one['first'], '.2f')])} |")
    if report["left_out"]:
        lines += ["", f"Not installed: {', '.join(report['left_out'])}."]
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    parser.add_argument("--quick", action="store_true", help="toy size")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    given = parser.parse_args(argv)
    episodes, repeats = (2, 1) if given.quick else (10, 5)
    needed = {name: re.findall(r"(?:^|\n)(?:import|from) (\w+)", imports) for name, (imports, _) in AGENTS.items()}
    there = [name for name, every in needed.items() if all(importlib.util.find_spec(one) for one in every)]
    report: dict[str, Any] = {"command": "python -m benchmarks.rollouts.agents", "hardware": given.hardware}
    report |= {"date": datetime.now(UTC).date().isoformat(), "episodes": episodes, "repeats": repeats, "rows": {}}
    report["left_out"] = [name for name in AGENTS if name not in there]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, provider() as (other, environment):
        sys.path.insert(0, name)
        for agent in there:
            report["rows"][agent] = asyncio.run(row(agent, Path(name), other, environment, episodes, repeats))
            write_json(given.out / "agents.json", report)
            print(f"{agent}: done", flush=True)
        sys.path.remove(name)
    (given.out / "agents.md").write_text(markdown(report))
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
