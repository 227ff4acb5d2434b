"""Calls that ask for what cannot be trained on, with `untrainable: serve`: sampled as they ask, shown to later calls
and to rewards, and never trained. Through HTTP, on the embedded engine and on a real SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from app.batch import UNTRAINABLE_CALLS
from datamodules.files.recording import read_batch
from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, Shaping
from datamodules.inference.sglang import Launch, SGLangEngine
from datamodules.pipeline.tally import Tally
from datamodules.processes.calls import CallFailed
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import AgentWorkflow, Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.standalone import SessionRecorder
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.inference.sglang.real_servers.servers import START_S, skip_unless_wanted
from tests.datamodules.workflows.gateway.agents import always_greedy, picky
from tests.datamodules.workflows.gateway.test_server import HELLO, bearer, new_session, serving
from tests.datamodules.workflows.gateway.test_sessions import CHAT, TOKENIZER
from tests.datamodules.workflows.gateway.wild_agents import Books, model_of_words
from tests.datamodules.workflows.scripted_engine import Pool, ScriptedEngine, play

SAID = [{"role": "user", "content": "the price of an apple"}]
LETTER = TOKENIZER.convert_tokens_to_ids("a")
SHAPED: list[tuple[str, dict[str, Any], Shaping | None]] = [
    ("chat/completions", {"messages": SAID, "max_tokens": 8, "top_p": 0.05}, Shaping(top_p=0.05)),
    ("messages", {"messages": SAID, "max_tokens": 8, "top_k": 2}, Shaping(top_k=2)),
    ("responses", {"input": SAID, "max_output_tokens": 8, "top_p": 0.2, "stream": True}, Shaping(top_p=0.2)),
    ("completions", {"prompt": "the price", "min_p": 0.5, "presence_penalty": 0.3}, None),
    ("chat/completions", {"messages": SAID, "logit_bias": {str(LETTER): 100}, "max_tokens": 3}, None),
    ("chat/completions", {"messages": SAID, "max_tokens": 8, "temperature": 0}, None),
]
TASK = Prompt(id="t", text="the price", answer="-")


@contextmanager
def embedded(_: Path) -> Iterator[Any]:
    engine = EmbeddedEngine(kv_cache_tokens=1 << 14, num_threads=1)
    engine.start(model_of_words(0), version=0, seed=1)
    yield engine
    engine.close()


@contextmanager
def sglang(logs: Path) -> Iterator[Any]:
    skip_unless_wanted()
    launch = Launch(device="cpu", dtype="float32", kv_cache_tokens=65536, num_threads=1, log_dir=str(logs))
    engine = SGLangEngine(launch=launch, start_timeout_s=START_S)
    engine.start(model_of_words(0), version=0, seed=1)
    yield engine
    engine.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("opened", [embedded, pytest.param(sglang, marks=pytest.mark.slow)])
def test_they_are_served_by_every_protocol_and_are_context_alone(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    async def run(books: Books) -> tuple[Session, list[int]]:
        episode = EpisodeEngine(books, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
        session = Session(episode, CHAT, Sampling(64, untrainable="serve"), Budget(), hermes_calls)
        statuses = []
        async with serving(session) as (client, (address,)):
            for path, body, _ in SHAPED:
                answer = await client.post(f"{address}/v1/{path}", json={"model": "m", **body}, headers=bearer(session))
                statuses.append(answer.status)
                await answer.read()
            said = session.exchanges[4].calls[0].message["content"]
            again = [*SAID, {"role": "assistant", "content": said}, {"role": "user", "content": "once more"}]
            for body in ({"messages": again}, {"messages": again, "top_p": 1, "top_k": -1, "logit_bias": {}}):
                url = f"{address}/v1/chat/completions"
                answer = await client.post(url, json={**body, "max_tokens": 4}, headers=bearer(session))
                statuses.append(answer.status)
            of_call = {"reward": 1, "call": session.exchanges[0].calls[0].id}
            answer = await client.post(f"{address}/reward", json=of_call, headers=bearer(session))
            statuses.append(answer.status)
            assert "not trained on" in (await answer.json())["error"]["message"]
        return session, statuses

    with opened(tmp_path) as engine:
        books = Books(engine)
        session, statuses = asyncio.run(run(books))
    assert statuses == [200] * 8 + [400]
    calls = session.transcript.calls
    assert [call.is_trained for call in calls] == [False] * 6 + [True] * 2 and session.untrained == 6
    model = model_of_words(0)
    for call, (_, _, shaping) in zip(calls, SHAPED):
        if shaping is not None:
            for at in range(len(call.response.tokens)):
                before = torch.tensor([[*call.prompt.tokens, *call.response.tokens[:at]]])
                with torch.no_grad():
                    odds = model(before).logits[0, -1].softmax(-1)
                more_likely = odds[odds > odds[call.response.tokens[at]]]
                assert more_likely.sum() < shaping.top_p and (shaping.top_k < 0 or len(more_likely) < shaping.top_k)
    assert calls[4].response.tokens == [LETTER] * 3
    greedy = calls[5]
    with torch.no_grad():
        logits = model(torch.tensor([[*greedy.prompt.tokens, *greedy.response.tokens]])).logits[0]
    assert logits[len(greedy.prompt.tokens) - 1 : -1].argmax(-1).tolist() == greedy.response.tokens

    # What is trained goes on with the very ids of what is not.
    found = session.trajectories(TASK, 0.5)
    assert len(found) == 2 and {one.metadata[UNTRAINABLE_CALLS] for one in found} == {6}
    first = [*calls[4].prompt.tokens, *calls[4].response.tokens]
    for one, call in zip(found, calls[6:]):
        assert one.tokens[: len(first)].tolist() == first
        assert one.tokens[one.loss_mask].tolist() == call.response.tokens and call.is_trained
    session.rewards.post({"reward": 0.5}, session.exchanges)
    SessionRecorder(tmp_path / "recorded").write(session)
    recorded = read_batch(tmp_path / "recorded", 0)[0].trajectories
    assert [bool(one.metadata.get("untrainable")) for one in recorded] == [True] * 6 + [False] * 2
    assert [int(one.loss_mask.sum()) for one in recorded[:6]] == [0] * 6
    for one, call in zip(recorded, calls):
        assert one.tokens.tolist() == [*call.prompt.tokens, *call.response.tokens]


MANNERS: list[tuple[str, dict[str, Any], str]] = [
    # What `openai-agents` sends for an agent that says nothing of its model.
    ("responses", {"input": "x", "reasoning": {"effort": "none"}, "text": {"verbosity": "low"}}, "reasoning"),
    ("responses", {"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
    ("chat/completions", {"messages": SAID, "reasoning_effort": "low"}, "reasoning_effort"),
    ("chat/completions", {"messages": SAID, "verbosity": "low"}, "verbosity"),
    ("messages", {"messages": SAID, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ("messages", {"messages": SAID, "output_config": {"effort": "low"}}, "output_config.effort"),
]


def test_how_a_model_is_to_think_and_write_is_refused_with_the_option_that_passes_it_over() -> None:
    engine = ScriptedEngine(TOKENIZER, ["three"] * 9)

    async def run(override: bool) -> tuple[Session, list[dict[str, Any] | None]]:
        session = new_session(engine, override=override)
        said = []
        async with serving(session) as (client, (address,)):
            for path, body, _ in MANNERS:
                body = body if path != "messages" else {**body, "max_tokens": 8}
                answer = await client.post(f"{address}/v1/{path}", json=body, headers=bearer(session))
                said.append((await answer.json())["error"] if answer.status == 400 else None)
            form = {"input": "x", "text": {"format": {"type": "json_object"}, "verbosity": "low"}}
            answer = await client.post(f"{address}/v1/responses", json=form, headers=bearer(session))
            assert (answer.status == 200) == override  # the form is told the model
            assert override or (await answer.json())["error"]["param"] == "text.verbosity"
        return session, said

    strict, said = asyncio.run(run(override=False))
    for error, (_, _, name) in zip(said, MANNERS):
        assert error is not None and error["message"].startswith(f"{name}: ")
        assert "override_sampling" in error["message"] and "template_options" in error["message"]
    assert not strict.transcript.calls
    lenient, said = asyncio.run(run(override=True))
    assert said == [None] * len(MANNERS) and lenient.counts["overridden_calls"] == len(MANNERS) + 1
    assert all(call.is_trained for call in lenient.transcript.calls)


class Obliging(ScriptedEngine):
    shapings = ("top_p",)


def test_an_episode_is_judged_by_all_and_trained_on_the_rest() -> None:
    engine = Obliging(TOKENIZER, ["three", "five"])
    workflow = AgentWorkflow(picky, max_new_tokens=20, workers=1, untrainable="serve", judged="transcript")
    pool = Pool(lambda _, transcript: float(len(transcript)))
    (one,) = play(workflow, engine, TOKENIZER, TASK, pool)
    assert [call["reply"]["content"] for call in pool.asked[0]] == ["three", "five"]
    assert one.reward == 2.0 and one.metadata[UNTRAINABLE_CALLS] == 1 and one.metadata["turns"] == 2
    assert one.tokens[one.loss_mask].tolist() == engine.responses[1].tokens and one.turn_index == 1
    assert [request.shaping for request in engine.seen] == [Shaping(top_p=0.5), None]

    tally = Tally()
    tally.finished(type("G", (), {"trajectories": [one]})())  # type: ignore[arg-type]
    assert tally.take()[UNTRAINABLE_CALLS] == 1.0


def test_an_episode_without_anything_to_train_on_costs_its_group() -> None:
    workflow = AgentWorkflow(always_greedy, max_new_tokens=20, workers=1, untrainable="serve")
    with pytest.raises(CallFailed, match="none of the agent's 1 replies can be trained on"):
        play(workflow, ScriptedEngine(TOKENIZER, ["three"]), TOKENIZER, TASK, lambda *_: 1.0)


def test_what_an_engine_cannot_do_is_refused_by_name() -> None:
    engine = Obliging(TOKENIZER, ["three"] * 9)
    bodies = [
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"top_p": 0},
        {"top_k": 1.5},
        {"frequency_penalty": 3},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": [1]},
        {"temperature": 1e-9},
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
    ]

    async def run() -> list[str]:
        session = new_session(engine, untrainable="serve")
        said = []
        async with serving(session) as (client, (address,)):
            for body in bodies:
                url = f"{address}/v1/chat/completions"
                answer = await client.post(url, json={**HELLO, **body}, headers=bearer(session))
                said.append((await answer.json())["error"]["param"] if answer.status == 400 else "served")
        return said

    assert asyncio.run(run()) == ["served", *(next(iter(body)) for body in bodies[1:])]
    request = GenerationRequest([1], 4, shaping=Shaping(top_p=0.5, min_p=0.1))
    with pytest.raises(GenerationError, match=r"request\.shaping\.min_p: Obliging does not honour it"):
        asyncio.run(EpisodeEngine(engine, TOKENIZER, None, name="e", seed="s").generate(request))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"AgentWorkflow\.untrainable: 'sometimes'"):
        AgentWorkflow(picky, untrainable="sometimes")  # type: ignore[arg-type]
