"""From an agent's sessions at a gateway to a trained model, as docs/agents.md says: its commands and its files as they
stand there. A model that says yes as often as no is rewarded for yes, and says it more often once it was trained.
"""

from __future__ import annotations

import csv
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from app.cli import main
from datamodules.files.recording import read_batch, versions
from modules.models import ModelSource, build_model
from tests.app.cli.gateway.processes import KEY, ROOT, client, post, running
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_WITH_ENDS

PAGE = (ROOT / "docs" / "agents.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line.partition("  #")[0].strip() for kind, text in BLOCKS if not kind for line in text.splitlines()]
ASKED = ["Yes or no?", "Sure?"]
SMALL = ["--trainer.accelerator=cpu", "--trainer.max_epochs=8", "--model.optimizer.init_args.lr=0.003"]
MOST_SESSIONS = 40


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model of bytes that answers yes, or no, and stays with it."""
    path = tmp_path_factory.mktemp("taught")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = {**TINY_WITH_ENDS, "vocab_size": len(tokenizer), "hidden_size": 32, "max_position_embeddings": 256}
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": None, "num_hidden_layers": 2}
    model = build_model(ModelSource(config=config))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(120):
        loss = sum(nll(model, tokenizer, [turn]) for word in ("yes", "no") for turn in said(word)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def provider(taught: Path) -> Iterator[str]:
    """Where the sessions of a gateway in front of the model are, which is a provider to other gateways."""
    with running("--model", str(taught)) as (_, at):
        yield at


@pytest.fixture
def workplace(taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with the page's files in it, and the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    (tmp_path / "my_model").symlink_to(taught)
    for kind, text in BLOCKS:
        if kind == "yaml" and (first := re.match(r"# (\w+\.yaml)", text)):
            (tmp_path / first[1]).write_text(text)
    return tmp_path


def said(word: str) -> list[tuple[list[dict[str, str]], str]]:
    """Both calls of a session in which the model said `word`: what it was shown, and what it replied."""
    first = [{"role": "user", "content": ASKED[0]}]
    return [
        (first, word),
        ([*first, {"role": "assistant", "content": word}, {"role": "user", "content": ASKED[1]}], word),
    ]


def nll(model: Any, tokenizer: PreTrainedTokenizerBase, calls: list[tuple[list[dict[str, str]], str]]) -> torch.Tensor:
    """Mean negative log-likelihood of a token that was replied, what ends a reply included; by transformers alone."""
    total, count = torch.zeros(()), 0
    for messages, reply in calls:
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = tokenizer.encode(shown, add_special_tokens=False)
        made = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]
        logits = model(torch.tensor([[*given, *made]])).logits[0, len(given) - 1 : -1].float()
        total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(made), reduction="sum")
        count += len(made)
    return total / count


def preference(directory: str) -> float:
    """log p(yes) - log p(no) of a saved model, in nats."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        yes, no = (float(nll(model, tokenizer, said(word)[:1])) * (len(word) + 1) for word in ("yes", "no"))
    return no - yes


def hold_sessions(at: str, protocol: str = "chat") -> list[list[str]]:
    """An agent of the `openai` package asks until both answers were given twice: the replies of the sessions, of which
    a first "yes" was rewarded with 1. The last one has no reward."""
    held: list[list[str]] = []
    while [one[0] for one in held].count("yes") < 2 or [one[0] for one in held].count("no") < 2:
        assert len(held) < MOST_SESSIONS, held
        name = f"s{len(held)}"
        held.append(ask(at, name, protocol))
        post(at, name, "/reward", {"reward": float(held[-1][0] == "yes")})
        post(at, name, "/end", {})
    ask(at, "unrewarded", protocol)
    return held


def ask(at: str, session: str, protocol: str = "chat") -> list[str]:
    messages: list[Any] = []
    for question in ASKED:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answered(at, session, protocol, messages)})
    return [one["content"] for one in messages[1::2]]


def answered(at: str, session: str, protocol: str, messages: list[Any]) -> str:
    if protocol == "responses":
        asked: Any = {"model": "any", "input": messages, "max_output_tokens": 40}
        with client(at, session).responses.stream(**asked) as stream:
            return str(stream.get_final_response().output_text)
    if protocol == "messages":
        anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]' brings it")
        there = anthropic.Anthropic(base_url=f"{at}/{session}", api_key=KEY, timeout=60.0)
        with there.messages.stream(model="any", messages=messages, max_tokens=40) as stream:
            blocks = stream.get_final_message().content  # none, where the model says nothing
            return "".join(block.text for block in blocks if block.type == "text")
    answer = client(at, session).chat.completions.create(model="any", messages=messages, max_tokens=40)
    return str(answer.choices[0].message.content)


def end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    return told


def fit(command: str, run: str) -> dict[str, list[float]]:
    """What was logged; `command` is one of the page's."""
    assert command in COMMANDS
    main([*command.split()[1:], "--run_dir", run, *SMALL])
    with Path(run, "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def check_imitation(logged: dict[str, list[float]], before: float) -> None:
    """`before`: what the loss is before the first step."""
    assert logged["loss"][0] == pytest.approx(before, abs=1e-4) and logged["loss"][-1] < logged["loss"][0]
    assert preference("imitated/model") > preference("my_model") + 0.1


def check_preference(logged: dict[str, list[float]]) -> None:
    assert logged["loss"][0] == pytest.approx(math.log(2), abs=1e-5) and logged["margin"][0] == pytest.approx(
        0, abs=1e-5
    )
    assert logged["loss"][-1] < logged["loss"][0] and logged["preferred"][-1] == 1 and logged["margin"][-1] > 0
    assert preference("preferred/model") > preference("my_model") + 0.1


@pytest.mark.slow
def test_on_what_a_models_gateway_recorded(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running("--model", "my_model", "--record", "recorded") as (process, at):
        held = hold_sessions(at)
        assert f"{len(held) + 1} session(s) recorded" in end(process)
    command = "arborist inspect recorded --model DIR"
    assert command in COMMANDS
    main([*command.replace("DIR", "my_model").split()[1:], "--out", "inspected"])
    assert f"{2 * len(held) + 2} sequences" in capsys.readouterr().out

    groups = [read_batch(Path("recorded"), version)[0] for version in versions(Path("recorded"))]
    good = [one for group in groups for one in group.trajectories if one.reward == 1.0]
    assert len({group.prompt_id for group in groups}) == 1
    assert len(good) == 2 * sum(replies[0] == "yes" for replies in held)
    sampled = torch.cat([one.behavior_logprobs[one.loss_mask] for one in good])
    check_imitation(fit("arborist fit --config imitate.yaml", "imitated"), -float(sampled.mean()))
    check_preference(fit("arborist fit --config prefer.yaml", "preferred"))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_on_what_a_providers_gateway_recorded(workplace: Path, provider: str, protocol: str) -> None:
    with running("--upstream", f"{provider}/{protocol}/v1", "--record", "recorded") as (process, at):
        held = hold_sessions(at, protocol)
        assert f"{len(held) + 1} session(s) recorded" in (told := end(process)) and KEY not in told
    (join,) = (line for line in COMMANDS if line.startswith("cat "))
    subprocess.run(join, shell=True, check=True, timeout=20)
    lines = [json.loads(line) for line in Path("all.jsonl").read_text().splitlines()]
    assert [[one["content"] for one in line["messages"][1::2]] for line in lines[:-1]] == held
    assert [line["rewarded"] for line in lines] == [True] * len(held) + [False]
    assert len({(line["task_id"], line["model"]) for line in lines}) == 1

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained("my_model").eval(),
        AutoTokenizer.from_pretrained("my_model"),
    )
    good = [line["messages"] for line in lines if line["reward"] == 1.0]
    with torch.no_grad():
        calls = [(one[:k], one[k]["content"]) for one in good for k in (1, 3)]
        before = float(nll(model, tokenizer, calls))
    more = "--data.path all.jsonl --data.tokenizer my_model"
    check_imitation(fit(f"arborist fit --config imitate.yaml {more}", "imitated"), before)
    check_preference(fit(f"arborist fit --config prefer.yaml {more}", "preferred"))
