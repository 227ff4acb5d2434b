"""The policy as its own judge, through the engine of the run: what it is asked, what it costs, what is refused; and a
run with the real embedded engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import jsonargparse
import torch

from datamodules import RolloutDataModule
from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.rewards import RewardError, exact_match
from datamodules.rewards.judges import PolicyModel, RankingJudge, RubricJudge
from datamodules.rewards.judges.pool import JudgePool
from modules import ModelSource, build_model
from tests.datamodules.rewards.judges.judging import PROMPT, judged, points
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, StandingStill
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(CHATML)
DEADLINE_S = 0.1
CRITERIA = {"right": "the answer is right", "short": "no word too many"}


def asked(
    replies: list[str],
    said: Callable[[GenerationRequest], str],
    max_context: int = 9000,
    kind: type[ScriptedEngine] = ScriptedEngine,
    **options: Any,
) -> tuple[list[Any], JudgePool, ScriptedEngine]:
    engine = kind(TOKENIZER, said, max_context=max_context)
    pool = JudgePool(RubricJudge(PolicyModel("policy", **options), CRITERIA))
    pool.join(engine, TOKENIZER, (TOKENIZER.eos_token_id,))

    async def body() -> list[Any]:
        await pool.open()
        return await asyncio.gather(*(pool.judge(PROMPT, one) for one in replies), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(body(), 60.0)), pool, engine


def test_the_policy_is_asked_in_its_own_template_and_its_tokens_are_counted() -> None:
    found, pool, engine = asked(["42", "It is <|end|> 10 points"], lambda request: points(10, 4))
    assert [one.value for one in found] == [0.7, 0.7] and found[0].parts["short"] == 0.4
    texts = [TOKENIZER.decode(one.tokens) for one in engine.seen]
    assert all(text.startswith("<|begin|>system\n") and text.endswith("<|begin|>assistant\n") for text in texts)
    assert "\n42\nEND REPLY" in texts[0] and texts[1].count("<|end|>") == texts[0].count("<|end|>")
    assert {one.temperature for one in engine.seen} == {0.0} and engine.seen[0].seed != engine.seen[1].seed
    spent = pool.spent()
    assert spent["judge_calls"] == 2 and spent["judge_input_tokens"] == sum(len(one.tokens) for one in engine.seen)
    assert spent["judge_output_tokens"] == sum(len(one.tokens) for one in engine.responses)


def test_the_same_reply_is_judged_alike() -> None:
    """At temperature 1 the draws, too, are a function of what is asked."""
    _, _, engine = asked(["42", "42", "41"], lambda request: points(10, 4), temperature=1.0)
    one, same, other = ((tuple(seen.tokens), seen.seed, seen.temperature) for seen in engine.seen)
    assert one == same and one[0] != other[0] and one[1] != other[1]


def test_what_cannot_be_read_is_asked_for_once_more_and_then_refused() -> None:
    def second(request: GenerationRequest) -> str:
        return points(10, 10) if "could not be read: no JSON object" in TOKENIZER.decode(request.tokens) else "fine"

    (found,), pool, _ = asked(["42"], second)
    assert found.value == 1.0 and pool.spent()["judge_misread"] == pool.spent()["judge_retries"] == 1
    (found,), pool, engine = asked(["42"], lambda request: "fine")
    assert isinstance(found, RewardError) and "answered 2 times what cannot be read: no JSON object" in str(found)
    assert len(engine.seen) == 2 and pool.spent()["judge_refused"] == 1
    (found,), _, _ = asked(["42"], lambda request: points(1, 1), max_tokens=5, misreadings=0)
    assert "cut off after 5 tokens" in str(found)


def test_what_the_engine_cannot_do_is_a_failed_reward() -> None:
    def fails(request: GenerationRequest) -> str:
        raise GenerationError("the engine is gone")

    assert "the judge could not answer: the engine is gone" in str(asked(["42"], fails)[0][0])
    (found,), _, engine = asked(["4" * 900], lambda request: "", max_context=1000)
    assert "1000 are all that the engine holds" in str(found) and engine.seen == []
    (found,), _ = judged(RubricJudge(PolicyModel("policy"), CRITERIA), ["42"])
    assert "none runs here; name a model behind a URL to try it" in str(found)


class Slow(ScriptedEngine):
    """Answers long after `DEADLINE_S`."""

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        await asyncio.sleep(5 * DEADLINE_S)
        return await super().generate(request)


class SlowAsItStandsStill(StandingStill, Slow):
    """Says so, too."""


def test_an_engine_that_stands_still_makes_no_verdict_late() -> None:
    def said(request: GenerationRequest) -> str:
        return points(10, 4)

    (found,), _, _ = asked(["42"], said, kind=SlowAsItStandsStill, deadline_s=DEADLINE_S)
    assert found.value == 0.7
    (found,), pool, _ = asked(["42"], said, kind=Slow, deadline_s=DEADLINE_S)
    assert "gave no verdict within 0.1 s (model.deadline_s)" in str(found) and pool.spent()["judge_refused"] == 1


class OnceStill(ScriptedEngine):
    """Says that it has stood still all the while, and for longer than that."""

    still_s = 0.0

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        self.still_s += 1e6
        return await super().generate(request)


def test_seconds_of_an_engine_that_stands_still_are_none_of_the_judges() -> None:
    for kind in (OnceStill, ScriptedEngine):
        _, pool, _ = asked(["42"], lambda request: points(10, 4), kind=kind)
        assert pool.spent()["judge_seconds"] >= 0 and pool.spent()["judge_calls"] == 1
        assert (pool.spent()["judge_seconds"] > 0) == (kind is ScriptedEngine)


def test_a_run_judges_itself_with_the_embedded_engine() -> None:
    """Weights that know nothing: every group is refused in words or judged, and held-out sums are the verifier's."""
    torch.manual_seed(0)
    config = {"model_type": "qwen3", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config |= {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": 1}
    model = build_model(ModelSource(config=config))
    engine = EmbeddedEngine(kv_cache_tokens=16384, num_threads=1)
    judge = RankingJudge(PolicyModel("policy", max_tokens=8), "the right sum first", verifier=exact_match)
    pool = JudgePool(judge)
    engine.start(model, 0, 0)
    try:
        pool.join(engine, TOKENIZER, (TOKENIZER.eos_token_id,))

        async def body() -> list[Any]:
            await pool.open()
            try:
                return await asyncio.gather(
                    *(one(PROMPT, str(k)) for k, one in enumerate(pool.of_group(2))), return_exceptions=True
                )
            finally:
                pool.close()

        found = asyncio.run(asyncio.wait_for(body(), 240.0))
    finally:
        engine.close()
    assert all(isinstance(one, RewardError) for one in found)  # random words rank nothing
    assert pool.spent()["judge_calls"] >= 2 and pool.spent()["judge_output_tokens"] >= 2


def test_it_is_configured_beside_models_behind_urls() -> None:

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutDataModule, "data")
    reward = {"class_path": "datamodules.rewards.judges.RubricJudge", "init_args": {"criteria": CRITERIA}}
    for model, kind in (
        ({"engine": "policy", "max_tokens": 9}, "PolicyModel"),
        ({"url": "http://x/v1", "name": "y"}, "JudgeModel"),
    ):
        reward["init_args"]["model"] = model
        made = parser.instantiate(
            parser.parse_object(
                {
                    "data": {
                        "prompts": {"class_path": "datamodules.prompts.ArithmeticPrompts"},
                        "workflow": {"class_path": "datamodules.workflows.RLVRWorkflow"},
                        "engine": {"class_path": "datamodules.inference.EmbeddedEngine"},
                        "tokenizer": "char:0123456789+=",
                        "reward": json.loads(json.dumps(reward)),
                    }
                }
            )
        )
        assert type(made.data._pool._judge.model).__name__ == kind
