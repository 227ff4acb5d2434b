"""A command that plays environments of the package `verifiers` (tasksets of its v1), for `AgentWorkflow`.

    PYTHON verifiers_agent.py TASKSET --tasks > tasks.jsonl
    PYTHON verifiers_agent.py TASKSET {row}

Promises: the taskset gives the tasks, verifiers plays them and scores them; this says where the model is. The last line
of the output is the reward. An episode that verifiers calls failed ends with an exit code, and is never scored. Imports
nothing of Arborist: verifiers pins versions of its own, so PYTHON is one that has it, in another environment.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from typing import Any

LOCAL = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}  # a chat, on this machine
_MOST_SHOWN = 2000  # characters of an error


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where the episode failed, 2 where there is no such task."""
    parser = argparse.ArgumentParser(description="Plays one task of a verifiers taskset, or lists its tasks.")
    parser.add_argument("taskset", help="its id: a module that can be imported and exports it")
    parser.add_argument("row", nargs="?", type=int, help="the task to play, from 0")
    parser.add_argument("--tasks", action="store_true", help="print the tasks instead, as JSON lines")
    parser.add_argument("--most", type=int, help="tasks to print at most; needed where they have no end")
    parser.add_argument("--config", type=json.loads, default=LOCAL, help="of the environment, as JSON")
    given = parser.parse_args(arguments)
    if given.tasks == (given.row is not None):
        parser.error("give either a row or --tasks")
    if given.most is not None and not given.tasks:
        parser.error("--most has no effect without --tasks")

    from verifiers.v1.utils import loaders

    wanted = {**given.config, "taskset": {**given.config.get("taskset", {}), "id": given.taskset}}
    environment = loaders.load_environment(loaders.resolve_env_config(wanted))
    tasks = iter(environment.taskset)
    if given.tasks:
        if given.most is None and not environment.taskset.bounded:
            parser.error(f"the tasks of {given.taskset} have no end; say how many with --most")
        for row, task in enumerate(itertools.islice(tasks, given.most)):
            print(json.dumps({"row": row, "question": _text(task.data.prompt)}))
        return 0
    task = next(itertools.islice(tasks, given.row, None), None)
    if task is None:
        print(f"{given.taskset} has no task {given.row}; list its tasks again", file=sys.stderr)
        return 2
    return asyncio.run(_play(environment, task))


async def _play(environment: Any, task: Any) -> int:
    import verifiers.v1 as vf

    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        for error in (*episode.errors, *(error for trace in episode.traces for error in trace.errors)):
            print(f"{error.type}: {error.message[:_MOST_SHOWN]}", file=sys.stderr)
        return 1
    print(sum(trace.reward for trace in episode.traces))
    return 0


def _text(prompt: Any) -> str:
    """What is shown of a task; it is played from the taskset's own."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)


if __name__ == "__main__":
    sys.exit(main())
