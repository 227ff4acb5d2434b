"""Outputs put together from a server's reports, whole, interrupted and wrong."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.inference.sglang.experts import ExpertLayout
from datamodules.inference.sglang.output import ForeignWeights, Output
from datamodules.inference.sglang.requests import request_body

KNOWN = {str(version): version for version in range(5)}


def reports(
    tokens: list[int], cuts: list[int], labels: list[int], spans: list[tuple[int, int, int]], incremental: bool
) -> list[dict[str, Any]]:
    """What a server says of `tokens` when it reports at `cuts`, its weights then being `labels`; the last one ends."""
    said, begin = [], 0
    for end, label in zip(cuts, labels):
        start = begin if incremental else 0
        meta: dict[str, Any] = {
            "completion_tokens": end,
            "weight_version": str(label),
            "output_token_logprobs": [[-0.01 * t, t, None] for t in tokens[start:end]],
            "finish_reason": None,
        }
        if end == cuts[-1] and len(said) == len(cuts) - 1:
            meta["finish_reason"] = {"type": "length", "length": len(tokens)}
            meta["weight_versions"] = [{"version": str(v), "start": a, "end": b} for v, a, b in spans]
        said.append({"output_ids": tokens[start:end], "meta_info": meta})
        begin = end
    return said


def an_output(count: int = 12) -> Output:
    return Output(GenerationRequest([1, 2], count, request_id="r1"), 100)


def assert_fits(output: Output) -> None:
    assert len(output.tokens) == len(output.logprobs) == len(output.versions)
    assert output.logprobs == [-0.01 * token for token in output.tokens]


@pytest.mark.parametrize("incremental", [True, False])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 11), max_size=6, unique=True))
def test_any_cut_gives_the_same_output(incremental: bool, inner: list[int]) -> None:
    tokens, spans = list(range(20, 32)), [(3, 0, 5), (4, 5, 12)]
    cuts = [*sorted(inner), 12]
    output = an_output()
    output.begin(3)
    said = reports(tokens, cuts, [3 if cut <= 5 else 4 for cut in cuts], spans, incremental)
    assert [output.add(one, KNOWN, incremental) for one in said] == [False] * len(inner) + [True]
    assert output.tokens == tokens and output.versions == [3] * 5 + [4] * 7
    assert output.finish_reason == "length" and output.left == 0
    assert_fits(output)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_lost_place_keeps_what_is_certain_and_the_next_one_goes_on(incremental: bool) -> None:
    output = an_output()
    output.begin(3)
    for one in reports(list(range(20, 32)), [1, 4, 6, 8, 12], [3, 3, 4, 4, 4], [], incremental)[:4]:
        assert not output.add(one, KNOWN, incremental)
    assert output.keep() == 4  # tokens 5 and 6 are of version 3 or 4, nobody knows
    assert output.tokens == [20, 21, 22, 23] and output.versions == [3] * 4 and output.left == 8
    assert output.prompt() == [1, 2, 20, 21, 22, 23]
    body = request_body(output, "name", 32, incremental)
    assert body["input_ids"] == output.prompt() and body["sampling_params"]["max_new_tokens"] == 8
    output.begin(4)
    for one in reports(list(range(40, 48)), [3, 8], [4, 4], [(4, 0, 8)], incremental):
        output.add(one, KNOWN, incremental)
    assert output.versions == [3] * 4 + [4] * 8 and len(output.tokens) == 12
    assert_fits(output)


def test_an_abort_that_repeats_the_last_token_adds_nothing() -> None:
    output = an_output()
    output.begin(0)
    first, last = reports([20, 21], [2, 2], [0, 0], [(0, 0, 2)], True)
    output.add(first, KNOWN, True)
    last["output_ids"], last["meta_info"]["output_token_logprobs"] = [21], [[-0.21, 21, None]]
    last["meta_info"]["finish_reason"] = {"type": "abort"}
    assert output.add(last, KNOWN, True)
    assert output.tokens == [20, 21] and output.finish_reason == "abort"


def read_along(stop: str, heard: list[int]) -> Output:
    """Of a request for tokens 20 to 31, the letters from "a" on, that ends at `stop`."""
    request = GenerationRequest(
        [1, 2],
        12,
        request_id="r1",
        stop_texts=(stop,),
        decode=lambda ids: "".join(chr(77 + one) for one in ids),
        on_tokens=lambda tokens, _: heard.extend(tokens),
    )
    output = Output(request, 100)
    output.begin(3)
    return output


@pytest.mark.parametrize("incremental", [True, False])
def test_what_comes_behind_a_stop_text_is_left_out(incremental: bool) -> None:
    output = read_along("ef", heard := [])
    said = reports(list(range(20, 32)), [1, 5, 9, 12], [3] * 4, [(3, 0, 12)], incremental)
    assert [output.add(one, KNOWN, incremental) for one in said[:3]] == [False, False, True]
    assert output.tokens == heard == list(range(20, 26)) and output.finish_reason == "stop" and output.stopped
    assert_fits(output)


@pytest.mark.parametrize("incremental", [True, False])
def test_a_stop_text_among_tokens_of_uncertain_versions_waits_for_the_last_report(incremental: bool) -> None:
    output = read_along("fg", heard := [])
    said = reports(list(range(20, 32)), [4, 8, 10], [3, 4, 4], [(3, 0, 5), (4, 5, 10)], incremental)
    said[2]["meta_info"]["finish_reason"] = {"type": "abort"}
    assert [output.add(one, KNOWN, incremental) for one in said[:2]] == [False, False]
    assert output.stop_seen and not output.stopped and heard == [20, 21, 22, 23]
    assert output.add(said[2], KNOWN, incremental)
    assert output.versions == [3] * 5 + [4] * 2 and output.finish_reason == "stop"
    assert output.tokens == heard == list(range(20, 27))


def test_a_stop_text_that_is_lost_with_its_place_is_none() -> None:
    output = read_along("fg", heard := [])
    for one in reports(list(range(20, 32)), [4, 8, 10], [3, 4, 4], [], True)[:2]:
        output.add(one, KNOWN, True)
    assert output.keep() == 4 and not output.stopped
    output.begin(4)
    # "d" was kept, the next place says "e": a stop may begin at one place and end at another.
    output = read_along("de", heard := [])
    for one in reports(list(range(20, 24)), [4, 9], [3, 3], [], True)[:1]:
        output.add(one, KNOWN, True)
    assert output.keep() == 4
    output.begin(3)
    assert output.add(reports([24, 25], [2, 9], [3, 3], [], True)[0], KNOWN, True)
    assert output.tokens == heard == [20, 21, 22, 23, 24] and output.stopped


@pytest.mark.parametrize("label", ["default", "5", None, "v4-0123abcd"])
def test_weights_that_are_not_this_runs_are_refused(label: str | None) -> None:
    output = an_output()
    output.begin(4)
    (one,) = reports([20], [1], [4], [(4, 0, 1)], True)
    one["meta_info"]["weight_version"] = label
    with pytest.raises(ForeignWeights, match=f"serves weights '{label}', which this run did not give it"):
        output.add(one, KNOWN, True)
    assert output.keep() == 0


def spoil_spans(meta: dict[str, Any]) -> None:
    meta["weight_versions"][0]["end"] -= 1


def spoil_order(meta: dict[str, Any]) -> None:
    meta["weight_versions"] = [{"version": "1", "start": 0, "end": 1}, {"version": "0", "start": 1, "end": 2}]


def spoil_ids(meta: dict[str, Any]) -> None:
    meta["output_token_logprobs"][1][1] = 99


def spoil_logprob(meta: dict[str, Any]) -> None:
    meta["output_token_logprobs"][0][0] = float("nan")


def spoil_sign(meta: dict[str, Any]) -> None:
    meta["output_token_logprobs"][1][0] = 0.2  # a probability, say


def spoil_count(meta: dict[str, Any]) -> None:
    del meta["output_token_logprobs"][1]


def spoil_length(meta: dict[str, Any]) -> None:
    meta["completion_tokens"] = -2


def spoil_reason(meta: dict[str, Any]) -> None:
    meta["finish_reason"] = {"type": "abort", "status_code": "nine"}


def spoil_end(meta: dict[str, Any]) -> None:
    meta["weight_versions"][0]["end"] = 10**15


def spoil_start(meta: dict[str, Any]) -> None:
    meta["weight_versions"] = [{"version": "1", "start": 5, "end": 7}]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_spans, "2 tokens came with the versions of 1"),
        (spoil_order, "versions decrease"),
        (spoil_ids, "log-probabilities of"),
        (spoil_logprob, "not finite"),
        (spoil_sign, r"a log-probability is 0\.2, which is above 0"),
        (spoil_count, "2 tokens came with 1 log-probabilities"),
        (spoil_length, "completion_tokens is -2"),
        (spoil_reason, "status_code is a str"),
        (spoil_end, "2 tokens came with the versions of tokens 0 to 1000000000000000"),
        (spoil_start, "2 tokens came with the versions of tokens 5 to 7"),
    ],
)
def test_a_report_that_contradicts_itself_is_an_error(spoil: Any, message: str) -> None:
    output = an_output()
    output.begin(0)
    (one,) = reports([20, 21], [2], [1], [(1, 0, 2)], True)
    spoil(one["meta_info"])
    with pytest.raises(GenerationError, match=f"'r1'.*{message}"):
        output.add(one, KNOWN, True)


def test_more_than_was_asked_for_is_an_error() -> None:
    tokens = list(range(20, 24))
    for request, message in (
        (GenerationRequest([1], 3), "4 tokens came where 3 were left"),
        (GenerationRequest([1], 8, stop_token_ids=(21,)), "it goes on behind a stop token"),
        (GenerationRequest([1], 8, stop_token_ids=(99,)), None),
    ):
        for cuts in ([4], [2, 4], [1, 2, 3, 4]):
            output = Output(request, 100)
            output.begin(0)
            said = reports(tokens, cuts, [0] * len(cuts), [(0, 0, 4)], True)
            if message is None:
                assert [output.add(one, KNOWN, True) for one in said][-1] and output.tokens == tokens
            else:
                with pytest.raises(GenerationError, match=message):
                    for one in said:
                        output.add(one, KNOWN, True)
    output = Output(GenerationRequest([1], 8), 23)
    output.begin(0)
    with pytest.raises(GenerationError, match="token 23 is outside the vocabulary of 23"):
        output.add(reports(tokens, [4], [0], [(0, 0, 4)], True)[0], KNOWN, True)


def test_rounding_lifts_no_log_probability_above_zero() -> None:
    output = an_output()
    output.begin(0)
    (one,) = reports([20], [1], [0], [(0, 0, 1)], True)
    one["meta_info"]["output_token_logprobs"][0][0] = 2e-4
    assert output.add(one, KNOWN, True) and output.logprobs == [0.0]


def test_requests_are_plain_sampling() -> None:
    request = GenerationRequest([1, 2], 640, temperature=0.7, stop_token_ids=(3,), seed=1 << 61)
    body = request_body(Output(request, 100), "name", 32, incremental=False)
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["min_p"], sampling["temperature"]) == (1.0, -1, 0.0, 0.7)
    assert sampling["stop_token_ids"] == [3] and "ignore_eos" not in sampling  # it would switch stop tokens off
    assert 0 <= sampling["sampling_seed"] < 1 << 31
    assert sampling["stream_interval"] == 40  # at most 16 reports that repeat everything
    assert "logprob_start_len" not in body  # asking for the prompt's would switch its prefix cache off
    assert request_body(Output(GenerationRequest([1], 5), 100), "n", 32, True)["sampling_params"]["ignore_eos"]


LAYOUT = ExpertLayout(layers=(0, 2), total=3, chosen=2, experts=8, dtype=torch.uint8)


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(np.int32).tobytes()).decode()


def with_experts(array: Any, cuts: list[int], **request: Any) -> Output:
    """An output of twelve tokens behind two, whose last report has this array."""
    output = Output(GenerationRequest([1, 2], 12, experts_from=1, **request), 100, LAYOUT)
    output.begin(3)
    said = reports(list(range(20, 32)), cuts, [3] * len(cuts), [(3, 0, 12)], True)
    said[-1]["meta_info"]["routed_experts"] = array
    assert [output.add(one, KNOWN, True) for one in said] == [False] * (len(cuts) - 1) + [True]
    return output


def test_experts_are_read_of_the_last_report() -> None:
    chosen = np.random.default_rng(0).random((12, 3, 8)).argsort(-1)[..., :2]  # of tokens 1 to 12 of 14
    response = with_experts(encoded(chosen), [5, 12]).response()
    assert response.experts is not None and response.experts.dtype == torch.uint8
    assert np.array_equal(response.experts.numpy(), chosen[:, [0, 2]])


@pytest.mark.parametrize("said", ["", None])
def test_a_reply_of_one_token_to_a_prompt_that_is_known_has_none(said: str | None) -> None:
    output = Output(GenerationRequest([1, 2], 1, experts_from=2), 100, LAYOUT)
    output.begin(3)
    (one,) = reports([20], [1], [3], [(3, 0, 1)], True)
    one["meta_info"]["routed_experts"] = said
    assert output.add(one, KNOWN, True)
    response = output.response()
    assert response.tokens == [20] and response.experts is not None and response.experts.shape == (0, 2, 2)


def test_a_reply_that_a_text_ends_waits_for_the_report_that_has_them() -> None:
    chosen = np.random.default_rng(0).random((12, 3, 8)).argsort(-1)[..., :2]
    output = with_experts(encoded(chosen), [5, 12], stop_texts=("22",), decode=lambda ids: " ".join(map(str, ids)))
    response = output.response()
    assert response.tokens == [20, 21, 22] and response.experts is not None
    assert np.array_equal(response.experts.numpy(), chosen[:4, [0, 2]][: 2 + 3 - 1 - 1])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (None, "does not say which experts"),
        ([1, 2], "is a list, where text belongs"),
        ("=?", "no base64"),
        (encoded(np.zeros((11, 3, 2))), "66 numbers, where 12 tokens of 3 layers have 2 experts each"),
        (encoded(np.zeros(73)), "73 numbers"),
        (encoded(np.full((12, 3, 2), 8)), "experts 8 to 8, where a layer has 8"),
        (encoded(np.full((12, 3, 2), -1)), "experts -1 to -1"),
        (encoded(np.zeros((12, 3, 2))), "sent to one expert twice.*--moe-runner-backend triton"),
    ],
)
def test_experts_that_make_no_sense_are_refused(array: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        with_experts(array, [12]).response()


def test_experts_are_asked_for() -> None:
    body = request_body(Output(GenerationRequest([1, 2], 3, experts_from=1), 100, LAYOUT), "name", 8, True)
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    assert "return_routed_experts" not in request_body(Output(GenerationRequest([1, 2], 3), 100), "name", 8, True)
