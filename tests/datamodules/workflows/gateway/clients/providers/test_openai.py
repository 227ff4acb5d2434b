"""The `openai` package, unmodified, through the door: Chat Completions, Responses, Completions and models."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.clients.door import CALL, PRICES, QUESTION, TOKENIZER, Door, door

TOOL = {"type": "function", **LOOK_UP["function"], "strict": True}
RESULT = {"type": "function_call_output", "call_id": "nobodys", "output": "3"}


def client(there: Door, **options: Any) -> Any:
    return openai.OpenAI(base_url=there.v1, api_key=there.key, **{"max_retries": 0, **options})


def responded(there: Door, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return client(there).responses.create(model="any", **options)
    with client(there).responses.stream(model="any", **options) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        answer = stream.get_final_response()
    assert told == answer.output_text
    return answer


def results(answer: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call_output",
            "call_id": one.call_id,
            "output": str(PRICES[json.loads(one.arguments)["fruit"]]),
        }
        for one in answer.output
        if one.type == "function_call"
    ]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_responses_hold_a_conversation_with_tools(streamed: bool, stored: bool) -> None:
    """Sent whole each time, or gone on with by the id of the last answer."""
    with door() as there:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        more: dict[str, Any] = {}
        while True:
            answer = responded(there, streamed, input=items, tools=[TOOL], **more)
            given = results(answer)
            if not given:
                break
            if stored:
                items, more = given, {"previous_response_id": answer.id}
            else:
                items = [*items, *answer.output, *given]
        there.check_one_path()
    assert (answer.output_text, answer.status) == ("It is 6.", "completed")
    assert answer.usage.input_tokens == len(there.engine.seen[1].tokens) and answer.usage.output_tokens == 9


def test_instructions_are_not_carried_over() -> None:
    with door(["a", "b"]) as there:
        first = responded(there, False, input="x", instructions="Be brief.")
        responded(there, True, input="y", instructions="Be long.", previous_response_id=first.id)
        before, after = there.prompts()
    assert "Be brief." in before and "Be brief." not in after and "Be long." in after and "\nx<|end|>" in after


def test_a_response_that_is_cut_off_says_so() -> None:
    with door(["sixty", "sixty"]) as there:
        ask = {"model": "any", "input": "x", "max_output_tokens": 3}
        *_, last = client(there).responses.create(**ask, stream=True)
        assert last.type == "response.incomplete"
        for answer in (last.response, client(there).responses.create(**ask)):
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert answer.output_text == "six"


def test_responses_know_thoughts_developers_and_logprobs() -> None:
    with door(["six"]) as there:
        answer = responded(
            there,
            False,
            include=["message.output_text.logprobs"],
            input=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
                {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "5"},
            ],
        )
        (exchange,) = there.session.exchanges
    call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    assert exchange.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "5"},
    ]
    assert [one.token for one in answer.output[0].content[0].logprobs][:3] == ["s", "i", "x"]


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_go_on_with_text_and_with_ids(streamed: bool) -> None:
    with door(["b", "d", "f", "f"]) as there:

        def completed(**options: Any) -> list[str]:
            answer = client(there).completions.create(model="any", stream=streamed, **options)
            texts = [""] * options.get("n", 1)
            for part in answer if streamed else [answer]:
                for choice in part.choices:
                    texts[choice.index] += choice.text
            return texts

        assert completed(prompt="a") == ["b"]
        assert completed(prompt="abc") == ["d"]
        ids = TOKENIZER.encode("e", add_special_tokens=False)
        assert completed(prompt=ids, n=2, temperature=0.5) == ["f", "f"]
        assert there.engine.seen[1].tokens == TOKENIZER.encode("abc", add_special_tokens=False)
        assert there.engine.seen[2].tokens == ids and there.engine.seen[2].max_new_tokens == 16


def test_a_completion_shows_what_its_tokens_are_worth() -> None:
    with door(["six"]) as there:
        (choice,) = client(there).completions.create(model="any", prompt="a", logprobs=0).choices
        made = there.engine.responses[0]
    assert choice.logprobs.tokens[:3] == ["s", "i", "x"] and choice.logprobs.text_offset[:3] == [0, 1, 2]
    assert choice.logprobs.token_logprobs == made.logprobs


def test_models_are_listed() -> None:
    with door() as there:
        assert [one.id for one in client(there).models.list()] == ["policy"]
        assert client(there).models.retrieve("policy").id == "policy"
        with pytest.raises(openai.NotFoundError) as caught:
            client(there).models.retrieve("org/another")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "options", "param"),
    [
        ("responses", {"top_p": 0.5}, "top_p"),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("responses", {"text": {"verbosity": "low", "format": {"type": "text"}}}, "text.verbosity"),
        ("chat/completions", {"reasoning_effort": "none"}, "reasoning_effort"),
        ("responses", {"tool_choice": "required"}, "tool_choice"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"previous_response_id": "resp_x"}, "previous_response_id"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ("responses", {"input": []}, "input"),
        ("responses", {"input": [{"role": "user", "content": "x"}, RESULT]}, "input[1].call_id"),
        ("completions", {"echo": True}, "echo"),
        ("completions", {"logprobs": 2}, "logprobs"),
        ("completions", {"best_of": 3}, "best_of"),
        ("completions", {"prompt": ["a", "b"]}, "prompt"),
        ("completions", {"prompt": [1 << 40]}, "prompt"),
        ("completions", {"prompt": ""}, "prompt"),
        ("chat/completions", {"logit_bias": {"1": 2}}, "logit_bias"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(path: str, options: dict[str, Any], param: str) -> None:
    ask: dict[str, dict[str, Any]] = {
        "responses": {"input": "x"},
        "completions": {"prompt": "x"},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    }
    with door() as there, pytest.raises(openai.BadRequestError) as caught:
        client(there).post(f"/{path}", body={**ask[path], **options}, cast_to=object)
    assert caught.value.param == param and caught.value.message.count(param)


def test_a_result_belongs_to_a_call_before_it() -> None:
    """Of the answer that it goes on with, too; a history that was cut in between is refused, as the provider does."""
    with door([CALL, "It is 6."]) as there:
        ask: Any = {"model": "any", "tools": [TOOL]}
        called = client(there).responses.create(input=QUESTION, **ask)
        with pytest.raises(openai.BadRequestError, match="nothing before it made a call of this id") as caught:
            client(there).responses.create(input=[RESULT], previous_response_id=called.id, **ask)
        assert caught.value.param == "input[0].call_id" and len(there.engine.seen) == 1
        (call,) = (one for one in called.output if one.type == "function_call")
        result = {**RESULT, "call_id": call.call_id}
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.call_id"):
            client(there).responses.create(input=[result, call.model_dump(exclude_none=True)], **ask)
        answer = client(there).responses.create(input=[result], previous_response_id=called.id, **ask)
        assert answer.output_text == "It is 6."
        there.check_one_path()


def test_errors_have_the_codes_of_the_provider() -> None:
    with door([CALL]) as there:
        long: Any = [{"role": "user", "content": "x" * 5000}]
        for ask in (
            lambda: client(there).chat.completions.create(model="any", messages=long),
            lambda: client(there).responses.create(model="any", input=long),
            lambda: client(there).completions.create(model="any", prompt="x" * 5000),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                ask()
            assert caught.value.code == "context_length_exceeded"
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            client(there).chat.completions.create(model="any", messages=long, tools=[tool])
        assert caught.value.code == "invalid_function_parameters"
        with pytest.raises(openai.AuthenticationError) as refused:
            openai.OpenAI(base_url=there.v1, api_key="no").responses.create(model="any", input="x")
        assert refused.value.code == "invalid_api_key"
