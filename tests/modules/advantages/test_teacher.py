"""Teachers on servers, and that see more than the policy: their log-probabilities are their own, and what is wrong with
an answer is an error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.batch import TEACHER_PROMPT, BatchError, RolloutBatch
from datamodules.prompts.base import Prompt
from datamodules.workflows import RLVRWorkflow
from modules import ModelSource, PolicyModule, Refresh, TeacherServer, build_model
from modules.advantages import teacher as asking
from modules.advantages.teacher import TeacherLost, shown
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, play
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_policy import fit, make_batch, naive_model, naive_outputs, parameters, sgd, source
from tests.modules.models.test_reference import TEACHES, assert_same

LOCK = threading.Lock()
CUT_SHORT: dict[str, Any] = {}
"""A server that is restarted in the middle of its answer."""


@contextmanager
def served(answer: Callable[[dict[str, Any], int], Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An HTTP server that answers POST /generate: with a status, or an object."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with LOCK:
                asked.append({"path": self.path, **body})
                said = answer(body, len(asked) - 1)
            text = json.dumps({"error": {"message": "no"}} if isinstance(said, int) else said).encode()
            if said is CUT_SHORT:
                self.send_response(200)
                self.send_header("content-length", "5000")
                self.end_headers()
                self.wfile.write(b'{"meta_info": ')
                return
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def scorer(model: Any) -> Callable[[dict[str, Any], int], Any]:
    """Scores a prompt as SGLang does: from `logprob_start_len` on, whose own token has none."""

    def answer(body: dict[str, Any], number: int) -> dict[str, Any]:
        tokens, first = body["input_ids"], body["logprob_start_len"]
        with torch.no_grad():
            logprobs = model(torch.tensor(tokens)[None]).logits[0].log_softmax(-1)
        rows = [[None, tokens[first], None]]
        rows += [[float(logprobs[t - 1, tokens[t]]), tokens[t], None] for t in range(first + 1, len(tokens))]
        return {"text": "", "meta_info": {"input_token_logprobs": rows, "prompt_tokens": len(tokens)}}

    return answer


def unheated(seed: int) -> RolloutBatch:
    """Sampled at temperature 1."""
    batch = make_batch(seed)
    batch.temperatures = torch.ones_like(batch.temperatures)
    return batch


def teacher() -> Any:
    torch.manual_seed(7)
    return build_model(source(num_hidden_layers=3, intermediate_size=40)).eval()


def test_a_teacher_on_a_server_teaches_as_one_here(tmp_path: Path) -> None:
    model = teacher()
    model.save_pretrained(tmp_path)
    here = PolicyModule(source(), optimizer=sgd, reference=ModelSource(str(tmp_path)), **TEACHES)
    logged = fit(here, [unheated(k) for k in range(2)])
    data = [unheated(k) for k in range(2)]
    with served(scorer(model)) as (url, asked):
        there = PolicyModule(source(), optimizer=sgd, reference=TeacherServer(url, str(tmp_path)), **TEACHES)
        assert [one["loss"] for one in fit(there, data)] == pytest.approx([one["loss"] for one in logged], abs=1e-5)
    assert_same(there.policy, parameters(here.policy), atol=1e-6)
    assert len(asked) == sum(map(len, data)) and {one["path"] for one in asked} == {"/generate"}  # one a sequence
    for batch in data:
        for i, read in enumerate(batch.split(batch.columns["reference"])):
            mask = batch.split(batch.loss_mask)[i]
            torch.testing.assert_close(read[mask], naive_outputs(model, batch, i)[0].detach()[mask], atol=1e-5, rtol=0)
            assert not read[~mask].any()


@pytest.mark.parametrize("first", [503, CUT_SHORT], ids=["busy", "cut short"])
def test_a_server_that_was_away_is_asked_again(first: Any) -> None:
    good = scorer(teacher())
    batch = unheated(0)
    with served(lambda body, number: first if number == 0 else good(body, number)) as (url, asked):
        found = TeacherServer(url, "there", max_concurrent=1).scores(batch)["logprobs"]
    assert len(asked) == len(batch) + 1 and bool((found[batch.loss_mask] < 0).all())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (400, "refuses .* tokens: status 400"),
        (500, r"gave no log-probabilities within 60 s \(reference\.deadline_s\): status 500"),
        ({"text": "hello"}, r"answers with log-probabilities of 0 tokens where \d+ were asked for"),
        ({"meta_info": {"input_token_logprobs": [[None, 1, None]] * 99}}, "answers with log-probabilities of 0 tokens"),
        ({"meta_info": {"input_token_logprobs": [[-1.0, -7, None]] * 99}}, "where .* were asked for"),
    ],
)
def test_what_is_no_answer_is_an_error(answer: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_FIRST_WAIT_S", 600.0)  # beyond the deadline: it is not asked again
    with served(lambda body, number: answer) as (url, _), pytest.raises(TeacherLost, match=said):
        TeacherServer(url, "there", deadline_s=60.0, max_concurrent=1).scores(unheated(0))


def test_the_last_attempt_hides_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has what is left of the deadline, and often ends with that alone."""
    clock = iter([0.0, 0.0, 1.0, 1.0, 60.0])
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    said = r"within 60 s \(reference\.deadline_s\): status 500.*; before that status 503"
    with served(lambda body, number: 500 if number else 503) as (url, _), pytest.raises(TeacherLost, match=said):
        TeacherServer(url, "there", deadline_s=60.0)._post("/generate", {"input_ids": [1]})


def test_what_a_server_cannot_score_is_refused(tmp_path: Path) -> None:
    hot = make_batch(0)
    hot.temperatures = torch.full_like(hot.temperatures, 0.7)
    with pytest.raises(BatchError, match="scores at temperature 1"):
        TeacherServer("http://localhost:1", "there", deadline_s=1.0).scores(hot)
    with pytest.raises(ValueError, match=r"reference\.url: 'localhost'"):
        TeacherServer("localhost", "there")
    with pytest.raises(ValueError, match="reference_offload has no effect on a reference that a server has"):
        PolicyModule(source(), reference=TeacherServer("http://x", "y"), reference_offload=True, **TEACHES)
    other = byte_tokenizer()
    other.add_tokens(["zebra"])
    for name, tokenizer in (("policy", other), ("teacher", byte_tokenizer())):
        naive_model().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    server = TeacherServer("http://localhost:1", str(tmp_path / "teacher"), deadline_s=1.0)
    module = PolicyModule(ModelSource(str(tmp_path / "policy")), optimizer=sgd, reference=server, **TEACHES)
    with pytest.raises(ValueError, match="take a model of the same family"):
        fit(module, [unheated(0)])


def hinted(seed: int) -> RolloutBatch:
    """Every second sequence has a prompt for its teacher: three tokens before its own."""
    batch = make_batch(seed)
    for i, (tokens, mask) in enumerate(zip(batch.sequences(), batch.split(batch.loss_mask), strict=True)):
        if i % 2 == 0:
            batch.metadata[i] = {TEACHER_PROMPT: [5, 6, 7, *tokens[: int(mask.nonzero()[0])].tolist()]}
    return batch


def test_a_policy_teaches_itself_by_a_richer_prompt() -> None:
    """What is read of the teacher is what the policy's own weights say of the reply behind the other prompt."""
    data = [hinted(0), hinted(1)]
    module = PolicyModule(source(), optimizer=sgd, reference="initial", reference_refresh=Refresh(every=1), **TEACHES)
    torch.manual_seed(0)
    start = build_model(source())
    fit(module, data[:1])
    batch = data[0]
    seen = shown(batch)
    assert seen is not None and int(seen.loss_mask.sum()) == int(batch.loss_mask.sum())
    for i, read in enumerate(batch.split(batch.columns["reference"])):
        mask, there = batch.split(batch.loss_mask)[i], seen.split(seen.loss_mask)[i]
        assert seen.sequences()[i][there].tolist() == batch.sequences()[i][mask].tolist()
        assert len(there) == len(mask) + (3 if i % 2 == 0 else 0)
        expected = naive_outputs(start, seen, i)[0].detach()[there]
        torch.testing.assert_close(read[mask], expected, atol=1e-5, rtol=0)
    assert shown(make_batch(0)) is None


def test_hints_that_nobody_reads_are_refused() -> None:
    with pytest.raises(BatchError, match="no reference reads them"):
        fit(PolicyModule(source(), optimizer=sgd), [hinted(0)])
    broken = hinted(0)
    broken.metadata[0] = {TEACHER_PROMPT: "text"}
    with pytest.raises(BatchError, match="must be a list of token ids"):
        shown(broken)


def test_a_policy_without_hints_has_nothing_to_teach_itself() -> None:
    module = PolicyModule(source(), optimizer=sgd, reference="initial", reference_refresh=Refresh(every=1), **TEACHES)
    with pytest.raises(BatchError, match="teaches nothing without hints"):
        fit(module, [unheated(0)])


def test_a_workflow_writes_what_the_teacher_is_shown() -> None:
    tokenizer = byte_tokenizer(CHATML)
    workflow = RLVRWorkflow(hint="{text}\nThe answer is {answer}.")
    text, chat = Prompt("t", text="6 x 7?", answer="42"), Prompt("c", messages=({"role": "user", "content": "6 x 7?"},))
    chat = replace(chat, answer="42")
    for prompt in (text, chat):
        [one] = play(workflow, ScriptedEngine(tokenizer, ["42"]), tokenizer, prompt, lambda p, c: 1.0)
        shown_text = tokenizer.decode(one.metadata[TEACHER_PROMPT])
        assert "6 x 7?\nThe answer is 42." in shown_text and ("<|begin|>user" in shown_text) == bool(prompt.messages)
        assert "The answer" not in tokenizer.decode(one.tokens)
    engine = ScriptedEngine(tokenizer, ["42"], max_context=workflow.max_new_tokens + 20)
    with pytest.raises(
        ValueError, match=r"RLVRWorkflow\.hint: prompt 't' has 24 tokens with its hint, which leaves no"
    ):
        play(workflow, engine, tokenizer, text, lambda p, c: 1.0)
    assert not engine.responses
    with pytest.raises(ValueError, match=r"RLVRWorkflow\.hint: {question} is none of"):
        RLVRWorkflow(hint="{question}")
