"""What every inference engine must do, whichever one stands behind the protocol.

A test module subclasses `EngineSuite` and provides the fixture `engine` (started with `policy`, version 0) and, where
an engine takes weights another way, `make_update`. All comparisons are with transformers' own forward pass.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from datamodules.inference.protocol import (
    GenerationError,
    GenerationRequest,
    GenerationResponse,
    InferenceEngine,
    Shaping,
    WeightUpdate,
)

VOCABULARY, CONTEXT = 61, 160


def tiny_policy(seed: int = 0) -> PreTrainedModel:
    """A float32 Qwen3 whose distributions are far from uniform, so that wrong weights or keys show."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float
) -> torch.Tensor:
    """float32 [len(output)]: transformers' own log-probabilities of `output` after `prompt`."""
    tokens = torch.tensor([[*prompt, *output]])
    logprobs = (model(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


def spelled(tokens: Sequence[int]) -> str:
    """Text of tokens that are a byte each, two to a character."""
    return bytes(tokens).decode("utf-16-le", "replace")


def prompts_of(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


async def generate_all(engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[GenerationResponse]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def wait_until_generating(engine: InferenceEngine, seconds: float = 0.03) -> None:
    """Returns `seconds` after the first request started to run."""
    deadline = time.monotonic() + 60
    while not engine.health()["running"]:
        assert time.monotonic() < deadline, f"no request started to run within 60 s: {engine.health()}"
        time.sleep(0.001)
    time.sleep(seconds)


def assert_parity(
    models: dict[int, PreTrainedModel], request: GenerationRequest, response: GenerationResponse, tolerance: float
) -> None:
    """Every token's log-probability is that of the weights of its recorded version."""
    assert len(response.tokens) == len(response.logprobs) == len(response.versions) > 0
    got = torch.tensor(response.logprobs)
    for version in set(response.versions):
        mine = torch.tensor(response.versions) == version
        expected = reference_logprobs(models[version], request.tokens, response.tokens, request.temperature or 1.0)
        torch.testing.assert_close(got[mine], expected[mine], atol=tolerance, rtol=0)


class EngineSuite:
    tolerance = 1e-5
    samples, distance = 2000, 0.12  # drawn of one distribution; the total variation they may be off
    penalties_lag = 0  # tokens

    def make_policy(self, seed: int = 0) -> PreTrainedModel:
        return tiny_policy(seed)

    @pytest.fixture
    def policy(self) -> PreTrainedModel:
        return self.make_policy()

    def make_update(self, version: int, model: PreTrainedModel) -> WeightUpdate:
        return WeightUpdate(version=version, state_dict=model.state_dict())

    def test_is_an_engine(self, engine: InferenceEngine) -> None:
        assert isinstance(engine, InferenceEngine) and issubclass(type("Own", (type(engine),), {}), type(engine))
        assert (engine.version, engine.vocab_size, engine.max_context) == (0, VOCABULARY, CONTEXT)
        health = engine.health()
        assert health["alive"] and not health["paused"] and health["error"] == ""

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_logprobs_are_the_models_own(self, engine, policy, temperature) -> None:
        requests = [
            GenerationRequest(prompt, 12, temperature=temperature) for prompt in prompts_of([1, 2, 3, 17, 40, 5, 5, 90])
        ]
        for request, response in zip(requests, asyncio.run(generate_all(engine, requests))):
            assert_parity({0: policy}, request, response, self.tolerance)
            assert len(response.tokens) == 12 and response.finish_reason == "length"

    def test_greedy_takes_the_most_likely_token(self, engine, policy) -> None:
        request = GenerationRequest(prompts_of([9])[0], 10, temperature=0.0)
        response = asyncio.run(engine.generate(request))
        assert_parity({0: policy}, request, response, self.tolerance)
        tokens = torch.tensor([request.tokens + response.tokens])
        with torch.no_grad():
            assert policy(tokens).logits[0, 8:-1].argmax(-1).tolist() == response.tokens

    def test_many_at_once_of_all_lengths_and_temperatures(self, engine, policy) -> None:
        requests = [
            GenerationRequest(prompt, 1 + i % 20, temperature=(1.0, 0.7, 1.3, 0.0)[i % 4], request_id=str(i))
            for i, prompt in enumerate(prompts_of([1 + (7 * i) % 60 for i in range(100)]))
        ]
        requests += [copy.deepcopy(request) for request in requests[:20]]  # groups: equal prompts side by side
        for request, response in zip(requests, asyncio.run(generate_all(engine, requests))):
            assert len(response.tokens) == request.max_new_tokens
            assert_parity({0: policy}, request, response, self.tolerance)

    def test_a_stop_token_ends_and_stays(self, engine, policy) -> None:
        prompt = prompts_of([6])[0]
        free = asyncio.run(engine.generate(GenerationRequest(prompt, 30, temperature=0.0)))
        stop = free.tokens[7]
        request = GenerationRequest(prompt, 30, temperature=0.0, stop_token_ids=(60 if stop != 60 else 59, stop))
        response = asyncio.run(engine.generate(request))
        assert response.finish_reason == "stop"
        assert response.tokens == free.tokens[: free.tokens.index(stop) + 1]
        assert_parity({0: policy}, request, response, self.tolerance)

    def test_a_stop_text_ends_with_the_token_that_completes_it(self, engine, policy) -> None:
        """Whatever it spans; the tokens until then are those without it, and whoever listens hears them."""
        prompts = prompts_of([6, 9, 14, 20, 31])
        free = asyncio.run(generate_all(engine, [GenerationRequest(one, 60, temperature=0.0) for one in prompts]))
        requests, ends, heard = [], [], []
        for prompt, one in zip(prompts, free):
            stop = spelled(one.tokens)[9:11]
            end = next(k for k in range(60) if stop in spelled(one.tokens[:k]))
            said: list[tuple[int, float]] = []
            requests.append(
                GenerationRequest(
                    prompt,
                    60,
                    temperature=0.0,
                    stop_texts=(stop, "never said"),
                    decode=spelled,
                    on_tokens=lambda tokens, logprobs, said=said: said.extend(zip(tokens, logprobs, strict=True)),
                )
            )
            ends.append(end)
            heard.append(said)
        for request, whole, end, said, response in zip(
            requests, free, ends, heard, asyncio.run(generate_all(engine, requests))
        ):
            assert response.finish_reason == "stop" and response.tokens == whole.tokens[:end]
            assert response.logprobs == pytest.approx(whole.logprobs[:end], abs=self.tolerance)
            assert response.versions == whole.versions[:end]
            assert said == list(zip(response.tokens, response.logprobs))
            assert_parity({0: policy}, request, response, self.tolerance)

    @pytest.mark.parametrize("what", ["on_tokens", "decode"])
    def test_a_function_that_fails_fails_its_request_alone(self, engine, policy, what: str) -> None:
        def failing(*_: Any) -> Any:
            raise KeyError("no such token")

        async def run() -> tuple[GenerationResponse, BaseException]:
            failed = GenerationRequest(prompts_of([5])[0], 10, request_id="r3", stop_texts=("!",), decode=spelled)
            setattr(failed, what, failing)
            other = asyncio.create_task(engine.generate(GenerationRequest(prompts_of([5])[0], 10)))
            with pytest.raises(GenerationError) as caught:
                await engine.generate(failed)
            return await other, caught.value

        other, error = asyncio.run(run())
        assert len(other.tokens) == 10 and f"'r3'.{what}" in str(error) and "no such token" in str(error)

    def test_samples_follow_the_distribution(self, engine, policy) -> None:
        prompt, count = prompts_of([4])[0], self.samples
        responses = asyncio.run(generate_all(engine, [GenerationRequest(prompt, 1) for _ in range(count)]))
        with torch.no_grad():
            expected = policy(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        seen = torch.bincount(torch.tensor([r.tokens[0] for r in responses]), minlength=VOCABULARY) / count
        # Total variation: below 0.09 for 2,000 honest samples of 61 tokens (0.18 for 500), about 0.4 for uniform ones.
        assert (seen - expected).abs().sum() / 2 < self.distance

    @pytest.mark.parametrize(
        ("shaping", "kept"),
        [
            (Shaping(top_k=3), lambda p: p >= p.sort().values[-3]),
            (Shaping(top_p=0.3), lambda p: p.sort().values.flip(0).cumsum(0)[p.argsort().flip(0).argsort()] - p < 0.3),
            (Shaping(min_p=0.8), lambda p: p >= 0.8 * p.max()),
            (Shaping(logit_bias=((3, -100.0), (5, 100.0))), lambda p: torch.arange(len(p)) == 5),
        ],
        ids=["top_k", "top_p", "min_p", "logit_bias"],
    )
    def test_a_shaped_request_draws_what_is_kept_of_the_distribution(self, engine, policy, shaping, kept) -> None:
        if not set(shaping.names) <= set(getattr(engine, "shapings", ())):
            pytest.skip(f"it does not name {shaping.names} in its shapings")
        (prompt,) = prompts_of([7])
        requests = [GenerationRequest(prompt, 1, 1.3, shaping=shaping, seed=k) for k in range(200)]
        drawn = asyncio.run(generate_all(engine, requests))
        probabilities = torch.tensor(
            [reference_logprobs(policy, prompt, [token], 1.3)[0].exp() for token in range(VOCABULARY)]
        )
        allowed = kept(probabilities)
        counts = torch.bincount(torch.tensor([one.tokens[0] for one in drawn]), minlength=VOCABULARY) / len(drawn)
        assert allowed.sum() < VOCABULARY / 2 and counts[~allowed].sum() == 0
        expected = (probabilities * allowed) / (probabilities * allowed).sum()
        assert (counts - expected).abs().sum() / 2 < 0.2
        if not shaping.logit_bias:  # log-probabilities are the model's own
            for request, response in zip(requests[:5], drawn):
                assert_parity({0: policy}, request, response, self.tolerance)

    @pytest.mark.parametrize(
        "shaping",
        [
            Shaping(frequency_penalty=0.7),
            Shaping(presence_penalty=2.0),
            Shaping(repetition_penalty=1.5),
            Shaping(frequency_penalty=-0.2, presence_penalty=0.9, repetition_penalty=1.1, logit_bias=((4, 0.5),)),
        ],
        ids=["frequency", "presence", "repetition", "all"],
    )
    def test_penalties_look_at_the_reply(self, engine, policy, shaping) -> None:
        if not set(shaping.names) <= set(getattr(engine, "shapings", ())):
            pytest.skip(f"it does not name {shaping.names} in its shapings")
        (prompt,) = prompts_of([5])
        plain, penalised = asyncio.run(
            generate_all(
                engine,
                [GenerationRequest(prompt, 24, 0.0), GenerationRequest(prompt, 24, 0.0, shaping=shaping)],
            )
        )
        said: list[int] = []
        for _ in range(24):
            with torch.no_grad():
                logits = policy(torch.tensor([[*prompt, *said]])).logits[0, -1].float()
            counted = said[: len(said) - self.penalties_lag]
            for token in set(counted):
                logits[token] -= shaping.presence_penalty + shaping.frequency_penalty * counted.count(token)
                factor = shaping.repetition_penalty
                logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
            for token, bias in shaping.logit_bias:
                logits[token] += bias
            said.append(int(logits.argmax()))
        assert penalised.tokens == said
        assert_parity({0: policy}, GenerationRequest(prompt, 24, 0.0), plain, self.tolerance)
        assert plain.tokens != said, "the penalties change nothing here"

    def test_updates_in_mid_generation(self, engine, policy) -> None:
        """Each token carries the version of its weights, and keys of older weights are never read again."""
        updates = 3
        models = {0: policy} | {version: self.make_policy(version) for version in range(1, updates + 1)}
        lengths = [1 + (11 * i) % 50 for i in range(60)]
        requests = [GenerationRequest(prompt, 90, temperature=1.0) for prompt in prompts_of(lengths)]
        heard: list[list[int]] = [[] for _ in requests[::2]]
        for request, mine in zip(requests[::2], heard):
            request.on_tokens = lambda tokens, logprobs, mine=mine: mine.extend(tokens)  # type: ignore[misc]

        def push() -> list[float]:
            seconds = []
            for version in range(1, updates + 1):
                wait_until_generating(engine)
                seconds.append(engine.update_weights(self.make_update(version, models[version])))
            return seconds

        async def run() -> tuple[list[GenerationResponse], list[float]]:
            pushing = asyncio.get_running_loop().run_in_executor(None, push)
            return await generate_all(engine, requests), await pushing

        responses, seconds = asyncio.run(run())
        assert engine.version == updates and all(second > 0 for second in seconds)
        assert engine.still_s > 0
        for request, response in zip(requests, responses):
            assert response.versions == sorted(response.versions) and len(response.tokens) == 90
            assert_parity(models, request, response, self.tolerance)
        assert any(len(set(response.versions)) > 1 for response in responses), "no request saw an update"
        assert heard == [response.tokens for response in responses[::2]]

    def test_pause_holds_and_resume_continues(self, engine, policy) -> None:
        request = GenerationRequest(prompts_of([5])[0], 20)

        async def run() -> GenerationResponse:
            began = engine.still_s  # of the first weights, where they are sent
            engine.pause()
            pending = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0.2)
            assert not pending.done() and engine.health()["paused"] and engine.still_s > began + 0.1
            engine.resume()
            response = await pending
            before = engine.still_s
            await asyncio.sleep(0.05)
            assert engine.still_s == pytest.approx(before) and before > began + 0.1
            return response

        assert_parity({0: policy}, request, asyncio.run(run()), self.tolerance)
        engine.resume()  # without a pause it does nothing
        assert not engine.health()["paused"]

    def test_an_update_during_a_pause_does_not_end_it(self, engine) -> None:
        newer = self.make_policy(5)
        request = GenerationRequest(prompts_of([5])[0], 10)

        async def run() -> GenerationResponse:
            engine.pause()
            engine.update_weights(self.make_update(1, newer))
            assert engine.health()["paused"]
            pending = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(0.1)
            assert not pending.done()
            engine.resume()
            return await pending

        response = asyncio.run(run())
        assert set(response.versions) == {1}
        assert_parity({1: newer}, request, response, self.tolerance)

    @pytest.mark.parametrize(
        ("field", "changes"),
        [
            ("tokens", {"tokens": []}),
            ("tokens", {"tokens": [1, VOCABULARY]}),
            ("tokens", {"tokens": [1, -1]}),
            ("max_new_tokens", {"max_new_tokens": 0}),
            ("max_new_tokens", {"max_new_tokens": CONTEXT}),
            ("temperature", {"temperature": -0.5}),
            ("temperature", {"temperature": float("nan")}),
            ("stop_token_ids", {"stop_token_ids": (VOCABULARY,)}),
            ("stop_texts", {"stop_texts": ("",), "decode": spelled}),
            ("decode", {"stop_texts": ("a",)}),
        ],
    )
    def test_a_bad_request_is_refused_by_field(self, engine, field, changes) -> None:
        request = GenerationRequest(**({"tokens": [1, 2], "max_new_tokens": 4, "request_id": "r7"} | changes))
        with pytest.raises(GenerationError, match=rf"'r7'\.{field}"):
            asyncio.run(engine.generate(request))
        assert len(asyncio.run(engine.generate(GenerationRequest([1, 2], 4))).tokens) == 4  # it lives on

    def test_an_older_version_is_refused(self, engine, policy) -> None:
        with pytest.raises(GenerationError, match=r"WeightUpdate\.version"):
            engine.update_weights(self.make_update(0, policy))
        assert engine.version == 0

    def test_several_event_loops_share_it(self, engine, policy) -> None:
        request = GenerationRequest(prompts_of([5])[0], 10)
        responses: list[GenerationResponse] = []
        threads = [
            threading.Thread(target=lambda: responses.append(asyncio.run(engine.generate(request)))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(responses) == 3
        for response in responses:
            assert_parity({0: policy}, request, response, self.tolerance)

    def test_a_cancelled_request_leaves_its_place(self, engine) -> None:
        async def given_up() -> bool:
            """In the middle of it, unless this thread is asleep until it is done."""
            loop, begun = asyncio.get_running_loop(), asyncio.Event()
            request = GenerationRequest(
                prompts_of([5])[0], 150, on_tokens=lambda *_: loop.call_soon_threadsafe(begun.set) and None
            )
            task = asyncio.create_task(engine.generate(request))
            await begun.wait()
            task.cancel()
            return isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)

        async def run() -> None:
            assert any([await given_up() for _ in range(3)]) or any([await given_up() for _ in range(30)])
            assert len((await engine.generate(GenerationRequest([1, 2], 4))).tokens) == 4
            deadline = time.monotonic() + 60
            while engine.health()["running"] or engine.health()["waiting"]:
                assert time.monotonic() < deadline, engine.health()
                await asyncio.sleep(0.01)

        asyncio.run(run())

    def test_close_fails_what_is_pending_and_is_final(self, engine) -> None:
        async def run() -> None:
            engine.pause()
            pending = asyncio.create_task(engine.generate(GenerationRequest([1, 2], 4, request_id="r9")))
            await asyncio.sleep(0.05)
            engine.close()
            with pytest.raises(GenerationError, match=r"r9.*closed"):
                await pending
            with pytest.raises(GenerationError, match="not running"):
                await engine.generate(GenerationRequest([1, 2], 4))

        asyncio.run(run())
        engine.close()
        assert not engine.health()["alive"]
