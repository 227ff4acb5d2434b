"""Reads recorded conversations out of checkouts of sierra-research/tau-bench and sierra-research/tau2-bench.

Formats, as the two repositories publish them: tau-bench's `historical_trajectories/MODEL-DOMAIN.json` is a list of
`{task_id, trial, reward, traj}`, `traj` a list of OpenAI chat messages that begins with the system prompt; tau2-bench's
`data/tau2/results/final/*.json` holds `info` (domain, policy, agent) and `simulations`, each `{task_id, trial,
reward_info, termination_reason, messages}`. The recordings do not hold the tools' schemas: these are read from the
checkout's source code, without running it (see `tools.py`).

Promises: an entry that lacks something is refused by file, entry and field, and the others are kept; nothing that a
checkout holds names a file to write or to read outside the two folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.text import printable, reason
from datamodules.conversations.chat import SystemPrompt, Transcript
from datamodules.conversations.messages import check_messages
from datamodules.conversations.tokens import is_reward
from datamodules.conversations.tools import read_system_template, tau2_tools, tau_tools
from datamodules.files.data_files import RecordedDataError
from datamodules.files.json_lines import parse_json

TAU_RESULTS = Path("historical_trajectories")
TAU2_RESULTS = Path("data/tau2/results/final")


@dataclass(frozen=True)
class DomainSystem:
    """Policy text of a domain, and the system prompt with tools that its agent was given."""

    policy: str
    prompt: SystemPrompt


@dataclass(frozen=True)
class TauFile:
    """Conversations of one policy in one domain; `termination[i]` says why conversation i ended, where recorded."""

    domain: str
    model: str
    transcripts: list[Transcript]
    termination: list[str | None]


@dataclass
class TauImport:
    """What a checkout gave: files of conversations, systems by domain, refused entries, and notes for the user."""

    repository: str
    files: list[TauFile] = field(default_factory=list)
    systems: dict[str, DomainSystem] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_checkout(checkout: Path, results: str | None = None) -> TauImport:
    """Reads the result files whose names match the glob `results` (None: the default of each repository).

    Raises:
        RecordedDataError: neither repository, no matching file, or source code of another form than expected.
    """
    if (checkout / TAU_RESULTS).is_dir():
        found, folder, pattern, read = TauImport("tau-bench"), TAU_RESULTS, "gpt-4o-airline.json", _read_tau
    elif (checkout / TAU2_RESULTS).is_dir():
        found, folder, pattern, read = TauImport("tau2-bench"), TAU2_RESULTS, "*.json", _read_tau2
    else:
        raise RecordedDataError(
            f"CHECKOUT: '{checkout}' has neither {TAU_RESULTS} (sierra-research/tau-bench) nor {TAU2_RESULTS} "
            "(sierra-research/tau2-bench); give the folder of a clone"
        )
    try:
        paths = sorted((checkout / folder).glob(results or pattern))
    except (NotImplementedError, ValueError) as error:  # pathlib's words for a pattern that is a whole path
        raise RecordedDataError(f"--results: '{results}' is no pattern of file names ({error})") from error
    if not paths:
        have = sorted(path.name for path in (checkout / folder).glob("*.json"))
        raise RecordedDataError(
            f"--results: no file of {checkout / folder} is named '{results or pattern}'; it has {have}"
        )
    for path in paths:
        try:
            data = parse_json(path.read_bytes())
        except json.JSONDecodeError as error:
            found.refused.append(f"{path}:{error.lineno}: not valid JSON ({error.msg}); check out the file again")
            continue
        except (OSError, ValueError) as error:
            why = reason(error)
            found.refused.append(f"{path}: not valid JSON ({why}); check out the file again")
            continue
        read(checkout, path, data, found)
    return found


def _read_tau(checkout: Path, path: Path, data: Any, found: TauImport) -> None:
    model, _, domain = path.stem.rpartition("-")
    if not model or not isinstance(data, list):
        found.refused.append(f"{path}: expected a list of conversations in a file named MODEL-DOMAIN.json")
        return
    prompts: list[str] = []

    def convert(entry: dict[str, Any], source: str) -> Transcript:
        traj = _need(entry, "traj", list, source)
        if not traj or not isinstance(traj[0], dict) or traj[0].get("role") != "system":
            raise RecordedDataError(f"{source}: traj[0] must be the system message")
        prompt = _need(traj[0], "content", str, f"{source}: traj[0]")
        if prompts and prompt != prompts[0]:
            raise RecordedDataError(
                f"{source}: traj[0].content differs from the system prompt of the entries before it"
            )
        messages = check_messages([_tau_message(m, f"{source}: traj[{k}]") for k, m in enumerate(traj) if k], source)
        transcript = _transcript(entry, model, _need(entry, "reward", (int, float), source), messages, source)
        prompts.append(prompt)
        return transcript

    transcripts, _ = _convert(data, path, "", convert, found)
    if transcripts:
        tools = tau_tools(checkout / "tau_bench" / "envs" / domain / "tools")
        _add_system(found, path, domain, DomainSystem(prompts[0], SystemPrompt(prompts[0], tools)))
        found.files.append(TauFile(domain, model, transcripts, [None] * len(transcripts)))


def _read_tau2(checkout: Path, path: Path, data: Any, found: TauImport) -> None:
    try:
        info = _need(data, "info", dict, str(path))
        environment = _need(info, "environment_info", dict, f"{path}: info")
        domain = _need(environment, "domain_name", str, f"{path}: info.environment_info")
        if not re.fullmatch(r"\w[\w-]{0,100}", domain):  # part of the names of files
            raise RecordedDataError(f"{path}: domain_name {printable(domain, 40)!r} is no plain name; correct it")
        policy = _need(environment, "policy", str, f"{path}: info.environment_info")
        agent = _need(info, "agent_info", dict, f"{path}: info")
        model = _need(agent, "llm", str, f"{path}: info.agent_info")
        simulations = _need(data, "simulations", list, str(path))
    except RecordedDataError as error:
        found.refused.append(str(error))
        return

    def convert(entry: dict[str, Any], source: str) -> Transcript:
        reward = _need(_need(entry, "reward_info", dict, source), "reward", (int, float), f"{source}: reward_info")
        # The agent sees neither the calls a simulated user makes on its own device nor their results.
        seen = [
            _tau2_message(message, f"{source}: messages[{k}]")
            for k, message in enumerate(_need(entry, "messages", list, source))
            if not _is_users_own(message)
        ]
        # The orchestrator greets the user in the agent's name; no model says it.
        asked = next((k for k, message in enumerate(seen) if message["role"] == "user"), 0)
        for message in seen[:asked]:
            if message["role"] == "assistant":
                message["weight"] = 0
        return _transcript(entry, model, reward, check_messages(seen, source), source)

    transcripts, entries = _convert(simulations, path, "simulations", convert, found)
    if not transcripts:
        return
    template = read_system_template(checkout / "src" / "tau2" / "agent" / "llm_agent.py")
    tools, notes = tau2_tools(checkout / "src" / "tau2" / "domains" / domain / "tools.py")
    found.notes.extend(note for note in notes if note not in found.notes)
    if agent.get("implementation", "llm_agent") != "llm_agent":
        found.notes.append(
            f"{path}: recorded with the agent '{agent['implementation']}', but {domain}_system.json holds the prompt "
            "of llm_agent"
        )
    _add_system(found, path, domain, DomainSystem(policy, SystemPrompt(template(policy), tools)))
    found.files.append(TauFile(domain, model, transcripts, [entry.get("termination_reason") for entry in entries]))


def _convert(
    entries: list[Any], path: Path, name: str, convert: Callable[[dict[str, Any], str], Transcript], found: TauImport
) -> tuple[list[Transcript], list[dict[str, Any]]]:
    """Converts entry by entry, ordered by task and trial; what fails is refused, what succeeds is kept."""
    kept: list[tuple[Transcript, dict[str, Any]]] = []
    seen: dict[tuple[str, int], str] = {}
    for number, entry in enumerate(entries):
        source = f"{path} {name}[{number}]"
        try:
            if not isinstance(entry, dict):
                raise RecordedDataError(f"{source}: expected an object, got {type(entry).__name__}")
            transcript = convert(entry, source)
            key = (transcript.task, transcript.trial)
            if key in seen:
                raise RecordedDataError(f"{source}: task {key[0]} has trial {key[1]} already ({seen[key]})")
            seen[key] = source
            kept.append((transcript, entry))
        except RecordedDataError as error:
            found.refused.append(str(error))
    first_seen = {task: i for i, task in reversed(list(enumerate(t.task for t, _ in kept)))}
    kept.sort(key=lambda pair: (_task_order(pair[0].task, first_seen), pair[0].trial))
    return [transcript for transcript, _ in kept], [entry for _, entry in kept]


def _task_order(task: str, first_seen: dict[str, int]) -> tuple[int, int]:
    """Numbered tasks by number, the others in the order of the file behind them."""
    return (0, int(task)) if task.isdecimal() and len(task) < 19 else (1, first_seen[task])


def _transcript(
    entry: dict[str, Any], model: str, reward: float, messages: list[dict[str, Any]], source: str
) -> Transcript:
    if not is_reward(reward):
        raise RecordedDataError(f"{source}: reward must be a finite number, got {reward!r:.40}")
    task = _need(entry, "task_id", (int, str), source)
    trial = _need(entry, "trial", int, source)
    if trial < 0:
        raise RecordedDataError(f"{source}: 'trial' must be 0 or more, got {trial}")
    return Transcript(str(task), trial, model, float(reward), messages, source)


def _tau_message(message: Any, source: str) -> dict[str, Any]:
    """An OpenAI message in our form: content never null, calls flat, arguments parsed, results with the call's id."""
    role = _need(message, "role", str, source)
    result: dict[str, Any] = {"role": role, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        result["tool_calls"] = []
        for n, call in enumerate(_need(message, "tool_calls", list, source)):
            where = f"{source}.tool_calls[{n}]"
            function = _need(call, "function", dict, where)
            arguments = _need(function, "arguments", str, f"{where}.function")
            try:
                parsed = parse_json(arguments)
            except ValueError as error:
                raise RecordedDataError(f"{where}.function.arguments: not valid JSON ({error})") from None
            name = _need(function, "name", str, f"{where}.function")
            result["tool_calls"].append({"id": call.get("id", ""), "name": name, "arguments": parsed})
    if role == "tool":
        result["id"] = _need(message, "tool_call_id", str, source)
    return result


def _tau2_message(message: Any, source: str) -> dict[str, Any]:
    role = _need(message, "role", str, source)
    result: dict[str, Any] = {"role": role, "content": message.get("content") or ""}
    if message.get("tool_calls"):
        calls = _need(message, "tool_calls", list, source)
        result["tool_calls"] = [
            {key: _need(call, key, kind, f"{source}.tool_calls[{n}]") for key, kind in _TAU2_CALL.items()}
            for n, call in enumerate(calls)
        ]
    if role == "tool":
        result["id"] = _need(message, "id", str, source)
    return result


_TAU2_CALL = {"id": str, "name": str, "arguments": dict}


def _is_users_own(message: Any) -> bool:
    if not isinstance(message, dict):
        return False
    return (message.get("role") == "user" and bool(message.get("tool_calls"))) or (
        message.get("role") == "tool" and message.get("requestor") == "user"
    )


def _add_system(found: TauImport, path: Path, domain: str, system: DomainSystem) -> None:
    if domain in found.systems and found.systems[domain] != system:
        raise RecordedDataError(
            f"{path}: its system prompt for '{domain}' differs from that of another file; import them into different "
            "folders with --results and --out"
        )
    found.systems[domain] = system


def _need(data: Any, key: str, kind: type | tuple[type, ...], source: str) -> Any:
    value = data.get(key) if isinstance(data, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        want = " or ".join(one.__name__ for one in kinds)
        got = type(value).__name__ if isinstance(data, dict) and key in data else "nothing"
        raise RecordedDataError(f"{source}: '{key}' must be {want}, got {got}")
    return value
