"""A coding agent on one task, and what its work is worth: python3 agent.py claude|codex FOLDER TASK

FOLDER has `files/`, of which the agent gets a copy to work in, and `check.py`, which is run there once it is done;
where that ends with 0 the reward is 1. Copy and home are the episode's own: nothing remembers another one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONTEXT, REPLY = 32768, 2048  # tokens: those of the model, and the workflow's max_new_tokens
PATIENCE_MS = "86400000"  # a call may stand still for as long as a training step
CLAUDE = {
    "ANTHROPIC_MODEL": "policy",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # begins the prompt with a version
    "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_THINKING": "1",
    "CLAUDE_CODE_EFFORT_LEVEL": "unset",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(REPLY),
    "CLAUDE_STREAM_IDLE_TIMEOUT_MS": PATIENCE_MS,
    "IS_SANDBOX": "1",  # root may skip permissions
}
CODEX = [
    "model=policy",
    "model_provider=gateway",
    f"model_context_window={CONTEXT}",
    "model_reasoning_summary=none",
    "web_search=disabled",
    "features.goals=false",
    "features.multi_agent=false",
]
PROVIDER = [
    "name=gateway",
    "env_key=OPENAI_API_KEY",
    "wire_api=responses",
    f"stream_idle_timeout_ms={PATIENCE_MS}",
]


def command(agent: str, task: str) -> list[str]:
    """The agent's program, without questions to anybody."""
    if agent == "claude":
        tools = ["--tools", "Bash,Read,Edit,Write", "--exclude-dynamic-system-prompt-sections"]
        return ["claude", "-p", task, *tools, "--output-format", "json", "--dangerously-skip-permissions"]
    provider = [*PROVIDER, f"base_url={os.environ['OPENAI_BASE_URL']}"]
    options = [*CODEX, *(f"model_providers.gateway.{option}" for option in provider)]
    settings = [word for option in options for word in ("-c", option)]
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *settings, task]


def main(agent: str, folder: str, task: str) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        copy, home = Path(own, "work"), Path(own, "home")
        shutil.copytree(Path(folder, "files"), copy)
        (home / "tmp").mkdir(parents=True)
        environment = {**os.environ, **CLAUDE, "HOME": str(home), "TMPDIR": str(home / "tmp")}
        ran = subprocess.run(
            command(agent, task), cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
        )
        if ran.returncode:  # a reply that was cut off, a context that is full: on_failure is its reward
            sys.exit(ran.returncode)
        checked = subprocess.run([sys.executable, Path(folder, "check.py").resolve()], cwd=copy, check=False)
        print(float(checked.returncode == 0))


main(*sys.argv[1:])
