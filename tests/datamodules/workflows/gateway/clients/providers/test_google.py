"""Google's Gemini API: requests in the shapes that google-genai (Python, JavaScript), Gemini CLI and others send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from datamodules.inference.protocol import GenerationRequest
from datamodules.workflows.gateway.protocols.servable import Sampling
from tests.datamodules.workflows.gateway.clients.door import CALL, PRICES, QUESTION, TOKENIZER, Door, door
from tests.datamodules.workflows.gateway.clients.test_thoughts import APART, KEEPS, THINKS, session_of

Parts = list[dict[str, Any]]

ASKED = {"role": "user", "parts": [{"text": QUESTION}]}
BOTH = CALL + '\n<tool_call>\n{"name": "look_up", "arguments": {"fruit": "pear"}}\n</tool_call>'
PROPERTIES = {"fruit": {"type": "STRING"}, "size": {"type": "INTEGER", "nullable": True}}
DECLARED = {
    "name": "look_up",
    "description": "price",
    "parameters": {"type": "OBJECT", "properties": PROPERTIES, "propertyOrdering": ["fruit"]},
    "responseJsonSchema": {"type": "integer"},  # google-genai, of a function's annotation
}
OVERRIDE = Sampling(200, override=True)


def post(there: Door, body: dict[str, Any], method: str = "generateContent", status: int = 200, **words: str) -> Any:
    path = f"{there.address}/{words.get('version', 'v1beta')}/models/any:{method}"
    answer = httpx.post(path, json=body, headers={"x-goog-api-key": words.get("key", there.key)}, timeout=20)
    assert answer.status_code == status, answer.text
    if method != "streamGenerateContent" or status != 200:
        return answer.json()
    return [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one.strip()]


def asking(*contents: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"contents": list(contents) or [ASKED], "tools": [{"functionDeclarations": [DECLARED]}], **more}


def results(calls: Parts, keys: tuple[str, ...] = ("id", "name")) -> dict[str, Any]:
    told = [
        {
            "functionResponse": {
                **{key: one[key] for key in keys},
                "response": {"output": str(PRICES[one["args"]["fruit"]])},
            }
        }
        for one in calls
    ]
    return {"role": "user", "parts": told}


def test_what_is_written_by_hand() -> None:
    """As the provider's own examples of curl are: the key in the address, and lists of one without brackets."""
    with door(["It is 6."]) as there:
        path = f"{there.address}/v1beta/models/any:generateContent"
        told = {"system_instruction": {"parts": {"text": "You are a shop."}}, "contents": {"parts": {"text": QUESTION}}}
        assert httpx.post(path, json=told, params={"key": "no"}).status_code == 401
        answer = httpx.post(path, json=told, params={"key": there.key}).json()
        assert answer["candidates"][0]["content"]["parts"] == [{"text": "It is 6."}]
        assert "You are a shop." in there.prompts()[0] and QUESTION in there.prompts()[0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("version", ["v1", "v1beta"])
def test_a_conversation_with_a_tool_is_one_path(version: str, streamed: bool) -> None:
    with door() as there:
        parts = asked(there, asking(), streamed, version)
        assert parts[0] == {"text": "I look."} and parts[1]["functionCall"]["args"] == {"fruit": "apple"}
        signed = [parts[0], {**parts[1], "thoughtSignature": "skip"}]  # Gemini CLI puts one there
        history = [ASKED, {"role": "model", "parts": signed}, results([parts[1]["functionCall"]])]
        assert asked(there, asking(*history), streamed, version) == [{"text": "It is 6."}]
        there.check_one_path()
        shown = there.prompts()[0]
        assert '"size": {"type": ["integer", "null"]}' in shown and "Ordering" not in shown
        assert 'price\\n\\nIts result follows this schema: {\\"type\\": \\"integer\\"}' in shown


def asked(there: Door, body: dict[str, Any], streamed: bool, version: str) -> Parts:
    """The parts of the reply, texts in one."""
    if not streamed:
        whole = post(there, body, version=version)
        events, count = [whole], whole["usageMetadata"]["candidatesTokenCount"]
    else:
        events = post(there, body, "streamGenerateContent", version=version)
        count = events[-1]["usageMetadata"]["candidatesTokenCount"]
        assert [one["candidates"][0].get("finishReason") for one in events] == [None] * (len(events) - 1) + ["STOP"]
    assert count == len(there.engine.responses[-1].tokens)
    assert {(one["responseId"], one["modelVersion"]) for one in events} == {
        (there.session.transcript.calls[-1].id, "policy")
    }
    parts = [part for one in events for part in one["candidates"][0]["content"]["parts"]]
    text = "".join(part.get("text", "") for part in parts)
    return [{"text": text}, *(part for part in parts if "text" not in part)]


@pytest.mark.parametrize("keys", [("id", "name"), ("name",)])
def test_results_find_their_calls_by_id_or_else_by_name_in_order(keys: tuple[str, ...]) -> None:
    with door([BOTH, "8.", "8."]) as there:
        said = post(there, asking())["candidates"][0]["content"]
        calls = [part["functionCall"] for part in said["parts"][1:]]
        if "id" not in keys:
            said["parts"] = [
                said["parts"][0],
                *({"functionCall": {k: v for k, v in one.items() if k != "id"}} for one in calls),
            ]
        told = results(calls, keys)
        post(there, asking(ASKED, said, told))
        assert "<tool>\n3\n</tool><tool>\n5\n</tool>" in there.prompts()[1] and not there.session.transcript.drift
        before = [*there.engine.seen[0].tokens, *there.engine.responses[0].tokens]
        assert there.engine.seen[1].tokens[: len(before)] == before
        told["parts"] += results(calls, keys)["parts"][:1]
        if "id" in keys:  # Gemini CLI sends each twice where it resumes a conversation
            post(there, asking(ASKED, said, told))
            assert "<tool>\n3\n</tool><tool>\n5\n</tool><tool>\n3\n</tool>" in there.prompts()[2]
            told["parts"][2]["functionResponse"]["id"] = "of_no_call"
        problem = post(there, asking(ASKED, said, told), status=400)["error"]
        assert (
            problem["message"].startswith("contents[2].parts[2].functionResponse.")
            and problem["status"] == "INVALID_ARGUMENT"
        )


def test_a_thought_that_clients_send_is_one_to_the_template() -> None:
    session, engine = session_of(["Four."], APART)
    said = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "Three."}]}
    with door(session=session) as there:
        post(there, {"contents": [ASKED, said, ASKED]})
    assert "<think>\nHm.\n</think>\n\nThree.<|end|>" in TOKENIZER.decode(engine.seen[0].tokens)


def test_a_thought_that_clients_do_not_see_is_shown_again() -> None:
    session, engine = session_of([THINKS + "Three.", "Four."], KEEPS)
    with door(session=session) as there:
        said = post(there, {"contents": [ASKED], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}})
        content = said["candidates"][0]["content"]
        assert content == {"parts": [{"text": "Three."}], "role": "model"}
        post(there, {"contents": [ASKED, content, ASKED]})
        before = [*engine.seen[0].tokens, *engine.responses[0].tokens]
        assert engine.seen[1].tokens[: len(before)] == before


def test_what_a_tool_gave_is_its_output_or_all_of_its_response() -> None:
    with door([CALL, "6."]) as there:
        said = post(there, asking())["candidates"][0]["content"]
        call = said["parts"][1]["functionCall"]
        told = results([call])
        told["parts"][0]["functionResponse"]["response"] = {"error": "shut"}
        told["parts"].append({"text": "Well?"})
        post(there, asking(ASKED, said, told))
        assert '<tool>\n{"error": "shut"}\n</tool><|end|>\n<|begin|>user\nWell?<|end|>' in there.prompts()[1]


def test_names_are_read_in_both_forms_and_system_and_limits_hold() -> None:
    with door(["It is 6."]) as there:
        body = {
            "system_instruction": {"parts": [{"text": "Be short."}]},
            "contents": [{"parts": [{"text": QUESTION, "inline_data": None}]}],
            "tools": [{"function_declarations": [{"name": "look_up", "parameters_json_schema": {"type": "object"}}]}],
            "generation_config": {"max_output_tokens": 4, "stop_sequences": ["!"], "candidate_count": 1, "seed": 1},
            "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "OFF"}],
        }
        reply = post(there, body)["candidates"][0]
        assert reply["finishReason"] == "MAX_TOKENS"
        asked = there.engine.seen[0]
        assert asked.max_new_tokens == 4 and asked.stop_texts == ("!",) and asked.seed is not None
        assert "<|begin|>system\nBe short.<|end|>" in there.prompts()[0] and "look_up" in there.prompts()[0]
        counted = post(there, {"generateContentRequest": {"model": "models/any", **body}}, "countTokens")
        assert counted == {"totalTokens": len(asked.tokens)}


SHAPE = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}
COLD = {
    "temperature": 0,
    "topP": 0.95,
    "topK": 64,
    "thinkingConfig": {"thinkingBudget": 0},
}  # Gemini CLI sends its like
THINKING = "generationConfig.thinkingConfig"
PICTURE = {"mimeType": "image/png", "data": "eA=="}
ANY = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look_up"]}}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"generationConfig": {"topP": 0.9}}, "top_p"),
        ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 9}}}, f"{THINKING}.thinkingBudget"),
        ({"generationConfig": {"thinking_config": {"thinking_level": "LOW"}}}, f"{THINKING}.thinkingLevel"),
        ({"generationConfig": {"temperature": 0}}, "temperature"),
        ({"generationConfig": SHAPE}, "generationConfig.responseSchema"),
        ({"generationConfig": {"responseSchema": {"type": "OBJECT"}}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"responseLogprobs": True}}, "generationConfig.responseLogprobs"),
        ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig"),
        ({"generationConfig": {"stopSequences": ["a"] * 6}}, "generationConfig.stopSequences"),
        ({"toolConfig": ANY}, "toolConfig.functionCallingConfig"),
        ({"toolConfig": {"retrievalConfig": {"languageCode": "en"}}}, "toolConfig.retrievalConfig"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "x"}}]}]}, "contents[0].parts[0]"),
        ({"contents": [ASKED, {"role": "model", "parts": [{"text": "It"}]}]}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": [{"parts": [{"inlineData": PICTURE}]}]}, "contents[0].parts[0].inlineData.data"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with door([]) as there:
        for method in ("generateContent", "streamGenerateContent"):
            problem = post(there, asking(**more), method, status=400)["error"]
            assert problem["message"].startswith(f"{field}: ") and problem["code"] == 400
        assert not there.engine.seen


def test_override_sampling_passes_over_what_calls_say_and_tells_the_model_of_shapes() -> None:
    with door(['{"price": 6}', CALL], sampling=OVERRIDE) as there:
        post(there, {"contents": [ASKED], "generationConfig": {**COLD, **SHAPE}})
        assert there.engine.seen[0].temperature == 1.0 and there.engine.seen[0].shaping is None
        assert "JSON that follows this schema" in there.prompts()[0] and '{"type": "object"}' in there.prompts()[0]
        post(there, asking(tool_config=ANY))
        assert "Your reply must be a call of the tool look_up." in there.prompts()[1]
        assert there.session.counts["overridden_calls"] == 1 and there.session.counts["prompted_calls"] == 2


def test_tools_that_no_call_may_use_are_not_shown() -> None:
    with door([CALL]) as there:
        said = post(there, asking(toolConfig={"functionCallingConfig": {"mode": "NONE"}}))
        assert said["candidates"][0]["content"]["parts"] == [{"text": CALL}] and "look_up" not in there.prompts()[0]


def test_several_candidates_are_told_apart() -> None:
    replies = iter(["ab", "cd"])
    with door(lambda _: next(replies)) as there:
        events = post(there, {"contents": [ASKED], "generationConfig": {"candidateCount": 2}}, "streamGenerateContent")
        said = {0: "", 1: ""}
        for one in events:
            (candidate,) = one["candidates"]
            said[candidate["index"]] += candidate["content"]["parts"][0]["text"]
        assert sorted(said.values()) == ["ab", "cd"]
        made = sum(len(one.tokens) for one in there.engine.responses)
        assert events[-1]["usageMetadata"]["candidatesTokenCount"] == made


def test_refusals_have_the_providers_shape_and_status() -> None:
    with door([]) as there:
        assert post(there, asking(), status=401, key="wrong")["error"]["status"] == "UNAUTHENTICATED"
        problem = post(there, {}, "embedContent", status=404)["error"]
        assert problem["status"] == "NOT_FOUND" and problem["message"].startswith(
            "/v1beta/models/any:embedContent: not"
        )


def test_a_stream_says_that_its_call_is_alive_with_what_its_packages_pass_over() -> None:
    """A comment would be taken for a broken event."""
    heard: list[str] = []
    with door(["It is 6."], quiet_s=0.05) as there:
        sample = there.engine.generate

        async def waits(request: GenerationRequest) -> Any:
            while not heard:
                await asyncio.sleep(0.01)
            return await sample(request)

        there.engine.generate = waits  # type: ignore[method-assign]
        path = f"{there.address}/v1beta/models/any:streamGenerateContent"
        with httpx.stream("POST", path, json=asking(), headers={"x-goog-api-key": there.key}, timeout=20) as answer:
            for piece in answer.iter_text():
                heard.append(piece)
        assert not heard[0].strip("\n") and "".join(heard).lstrip("\n").startswith("data: ")
