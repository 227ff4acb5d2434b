"""`arborist gateway`: a process that agents are pointed at, what it records, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from app.cli import gateway, main
from datamodules.conversations.sequence_files import load_sequences
from datamodules.conversations.tokens import RecordedDataError
from datamodules.files.recording import RecordingError, read_batch, versions
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.recorded import RecordedDataModule
from modules.models import ModelSource, build_model
from tests.app.cli.gateway.processes import KEY, client, post, running
from tests.datamodules.inference.sglang.real_servers.servers import KEY as SERVER_KEY
from tests.datamodules.inference.sglang.real_servers.servers import START_S, options, skip_unless_wanted
from tests.datamodules.workflows.gateway.clients.door import door
from tests.datamodules.workflows.scripted_engine import WITH_CALLS
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_WITH_ENDS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random chat model of bytes."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(WITH_CALLS)
    build_model(
        ModelSource(config={**TINY_WITH_ENDS, "vocab_size": len(tokenizer), "max_position_embeddings": 1024})
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def converse(at: str, session: str, text: str = "hello", turns: int = 2, **options: Any) -> list[str]:
    """Ids of the replies."""
    speaks, found = client(at, session), []
    messages: list[Any] = [{"role": "user", "content": text}]
    for _ in range(turns):
        answer = speaks.chat.completions.create(model="any", messages=messages, max_completion_tokens=8, **options)
        found.append(answer.id)
        said = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return found


def test_sessions_are_recorded_when_they_end_or_the_gateway_does(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "recorded"
    with running("--model", str(model), "--record", str(record)) as (process, at):
        first, second = converse(at, "good")
        post(at, "good", "/reward", {"reward": 0.5, "call": first})
        post(at, "good", "/reward", {"reward": 1})
        assert versions(record) == []
        assert post(at, "good", "/end", {}) == {"ended": True}
        assert versions(record) == [0]
        with pytest.raises(openai.PermissionDeniedError, match="the session has ended"):
            converse(at, "good")
        with pytest.raises(openai.AuthenticationError):
            client(at, "bad", "wrong").models.list()
        converse(at, "bad")
        post(at, "bad", "/reward", {"reward": 0})
        converse(at, "silent", "something else", 1)
        client(at, "empty").models.list()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0 and "3 session(s) recorded" in said and KEY not in said
    groups = [read_batch(record, version)[0] for version in versions(record)]
    assert len({one.prompt_id for one in groups}) == 2  # those that began alike are one task
    assert [len(one.trajectories) for one in groups] == [2, 2, 1]
    assert [one.trajectories[0].metadata["session"] for one in groups] == ["good", "bad", "silent"]
    assert groups[0].trajectories[0].metadata["call_reward"] == 0.5 and second != first

    found = load_sequences(record)
    assert len(found.tokens) == 5
    assert [int(mask.sum()) for mask in found.trained] == [
        len(one.tokens[one.loss_mask]) for group in groups for one in group.trajectories
    ]
    main(["inspect", str(record), "--out", str(tmp_path / "out")])
    assert "5 sequences" in capsys.readouterr().out

    with pytest.raises(RecordedDataError, match="unrewarded: 1 of 3 sessions have no reward"):
        RecordedDataModule(str(record)).setup("fit")
    imitated = RecordedDataModule(str(record), unrewarded="leave_out", min_reward=1.0)
    imitated.setup("fit")
    batch = imitated.batch(0)
    assert len(batch) == 2 and batch.rewards.tolist() == [1.5, 1.5]  # of the session, and of its first call on top
    assert torch.equal(batch.tokens, torch.cat([one.tokens for one in groups[0].trajectories]))
    assert torch.equal(batch.loss_mask, torch.cat([one.loss_mask for one in groups[0].trajectories]))
    pairs = RecordedDataModule(str(record), unrewarded="leave_out", pairs=True)
    pairs.setup("fit")
    batch = pairs.batch(0)
    assert batch.rewards.tolist() == [1.5, 1.5, 0.0, 0.0] and batch.episode_ids.tolist() == [0, 0, 1, 1]

    serve = ("--untrainable", "serve", "--idle_s", "1")
    with running("--model", str(model), "--record", str(record), *serve) as (process, at):
        converse(at, "third", turns=1)
        converse(at, "third", turns=1, top_p=0.1)
        post(at, "third", "/end", {})
        converse(at, "lost", turns=1)
        process.kill()
    assert versions(record) == [0, 1, 2, 3]  # behind those before; the kill has cost the session under way
    third = read_batch(record, 3)[0].trajectories
    assert [("untrainable" in one.metadata, bool(one.loss_mask.any())) for one in third] == [
        (False, True),
        (True, False),
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sglang_servers_generate_with_the_models_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was started with others; what is recorded is what the named model says."""
    skip_unless_wanted()
    torch.manual_seed(1)
    other = build_model(ModelSource(path=str(model)))
    for weights in other.parameters():
        torch.nn.init.normal_(weights, std=0.02)
    other.save_pretrained(tmp_path / "other")
    server = ServerProcess(options(str(tmp_path / "other"), context=1024), tmp_path / "server.log", SERVER_KEY)
    monkeypatch.setenv("ARBORIST_SGLANG_API_KEY", SERVER_KEY)
    record = tmp_path / "recorded"
    try:
        asyncio.run(server.ready(START_S))
        with running("--model", str(model), "--servers", server.url, "--record", str(record)) as (process, at):
            with pytest.raises(openai.BadRequestError, match="untrainable: serve"):
                converse(at, "one", temperature=0.0)
            converse(at, "one", turns=3)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0 and "1 session(s) recorded" in said and SERVER_KEY not in said
    finally:
        server.stop(0.0)
    ours = build_model(ModelSource(path=str(model))).eval()
    found = read_batch(record, 0)[0].trajectories
    assert len(found) == 3
    for one in found:
        with torch.no_grad():
            logprobs = ours(one.tokens[None].long()).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, one.tokens[1:, None].long())[:, 0][one.loss_mask[1:]]
        torch.testing.assert_close(one.behavior_logprobs[one.loss_mask], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_in_front_of_a_provider_agents_send_its_key(tmp_path: Path) -> None:
    record = tmp_path / "recorded"
    with door(["x", "y", "z"]) as there:
        with running("--upstream", f"{there.v1}/", "--record", str(record)) as (process, at):
            messages: Any = [{"role": "user", "content": "hello"}]
            speaks = client(at, "good", there.key)
            assert speaks.chat.completions.create(model="any", messages=messages).choices[0].message.content == "x"
            with pytest.raises(openai.AuthenticationError):  # the gateway's own is nothing here
                client(at, "bad").chat.completions.create(model="any", messages=messages)
            assert post(at, "good", "/reward", {"reward": 1}) == {"reward": 1.0, "calls": 0}
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
        assert process.returncode == 0 and there.key not in said and KEY not in said
        assert "1 session(s) recorded" in said and "1 replies; calls not recorded: 1 failed, 0 cut off" in said
        (file,) = record.iterdir()
        (line,) = map(json.loads, file.read_text().splitlines())
        assert (line["session"], line["reward"], line["rewarded"]) == ("good", 1.0, True)
        assert [one["content"] for one in line["messages"]] == ["hello", "x"] and there.key not in file.read_text()


def test_a_folder_that_nothing_was_recorded_in_is_not_named_at_the_end(tmp_path: Path) -> None:
    record = tmp_path / "recorded"
    with running("--upstream", "http://127.0.0.1:9/v1", "--record", str(record)) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and not record.exists()
    assert said.splitlines()[-1].startswith("no session was recorded, 0 replies; calls not recorded: 0 failed")


@pytest.mark.slow
def test_without_a_key_one_is_drawn_and_silence_ends_a_session(model: Path, tmp_path: Path) -> None:
    with running("--model", str(model), "--record", str(tmp_path), "--idle_s", "0.2", key=None) as (process, at):
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        key = said[1].rsplit(" ", 1)[1].strip()
        assert len(key) > 20
        client(at, "s", key).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "x"}], max_completion_tokens=2
        )
        ends = 200
        while not versions(tmp_path) and ends:
            ends -= 1
            signal.sigtimedwait([], 0.05)
        assert versions(tmp_path) == [0]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert key.encode() not in (tmp_path / "batch_00000000.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        (["--model", "nowhere"], KEY, "--model: nowhere holds no config.json"),
        ([], KEY, "--model, --upstream: neither is given"),
        (["--model", "x", "--upstream", "http://x/v1"], KEY, "--model, --upstream: both are given"),
        (["--upstream", "x/v1"], KEY, "--upstream: must be a URL such as"),
        (["--upstream", "https://me:secret@x/v1"], KEY, "--upstream: must be a URL such as"),
        (["--upstream", "http://x/v1", "--max_calls", "3"], KEY, "--max_calls: has no effect with --upstream"),
        (["--upstream", "http://x/v1", "--port", "99999"], KEY, "--port: 99999, must be between 0 .* and 65535"),
        (["--model", "x", "--port=-1"], KEY, "--port: -1, must be between 0"),
        (["--model", "nowhere"], "short", "ARBORIST_GATEWAY_KEY: must be at least 8"),
        (["--model", "nowhere", "--record", __file__], KEY, rf"--record: {__file__} is no directory; name another"),
        (["--upstream", "http://x/v1", "--record", f"{__file__}/x"], KEY, rf"--record: {__file__} is no directory"),
    ],
)
def test_what_cannot_be_served(options: list[str], key: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gateway.KEY_VARIABLE, key)
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    with pytest.raises((gateway.CannotStart, RecordingError), match=says):
        gateway.run(parser.parse_args(options))


def test_a_parser_that_the_model_has_not(model: Path) -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    given = parser.parse_args(["--model", str(model), "--port", "0", "--parser", "ResponseTemplate"])
    with pytest.raises(gateway.CannotStart, match="--parser: ResponseTemplate: the tokenizer has no response_template"):
        gateway.run(given)
