"""What an agent asks for that is not to be had: the refusal says what to do instead."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError, OpenAI

from tests.datamodules.workflows.gateway.clients.door import QUESTION, door

ANSWER = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
LOOK_UP = {"type": "function", "function": {"name": "look_up"}}


def test_a_path_that_is_not_served_is_told_what_is() -> None:
    with door([]) as there:
        client = OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        with pytest.raises(NotFoundError) as caught:
            client.embeddings.create(model="any", input="apple")
        assert "/v1/embeddings: not served; the model that is trained answers /v1/chat/comp" in str(caught.value)
        assert "a base_url and api_key of its provider" in str(caught.value)
        assert there.session.asked == 1  # the client has found its session
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=there.v1, api_key="no", max_retries=0).embeddings.create(model="any", input="apple")


@pytest.mark.parametrize(("method", "path", "other"), [("GET", "chat/completions", "POST"), ("POST", "models", "GET")])
def test_a_path_that_is_asked_otherwise_is_told_how(method: str, path: str, other: str) -> None:
    with door([]) as there:
        client = OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        with pytest.raises(APIStatusError, match=f"/v1/{path}: does not take {method}; {other} it") as caught:
            getattr(client, method.lower())(f"/{path}", cast_to=object)
        assert caught.value.status_code == 405


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/reward", "/reward"),
    ],
)
def test_a_base_url_that_is_nearly_right_is_told_the_right_one(path: str, meant: str) -> None:
    with door([]) as there:
        client = OpenAI(base_url=there.address, api_key=there.key, max_retries=0)
        with pytest.raises(NotFoundError) as caught:
            client.post(path, cast_to=object, body={})
        told = f"{path}: not served, {there.address}{meant} is: the base URL is {there.v1} (OPENAI_BASE_URL), or"
        assert told in str(caught.value) and there.session.asked == 1 and told in there.session.refused


@pytest.mark.parametrize(
    ("body", "encoding", "status", "says"),
    [
        (gzip.compress(b"{}", mtime=0), "gzip", 415, "Content-Encoding: not supported; send requests uncompressed"),
        (b"{'model': 'any'}", "identity", 400, "the request is no JSON: "),
        (b'{"messages": "' + b"x" * (8 << 20) + b'"}', "identity", 413, "has more than 8 MiB; send a shorter conv"),
    ],
)
def test_what_cannot_be_heard_is_why_there_is_no_reply(body: bytes, encoding: str, status: int, says: str) -> None:
    """An agent that swallows it is not said to have asked nobody."""
    with door([]) as there:
        headers = {"Authorization": f"Bearer {there.key}", "Content-Encoding": encoding}
        answer = httpx.post(f"{there.v1}/chat/completions", content=body, headers=headers)
        assert answer.status_code == status and says in answer.json()["error"]["message"]
        assert there.session.asked == 1 and says in there.session.refused


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            {"response_format": ANSWER},
            "response_format: .*: have override_sampling tell .*, or say it in the prompt and read the reply, or offer",
        ),
        (
            {"parallel_tool_calls": False},
            "parallel_tool_calls: false .*: leave it out, or have override_.*, or offer the shape .* as a tool",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice: .*; have override_.*, or offer the shape .*bind_tools.* of with_structured_output",
        ),
    ],
)
def test_a_shape_that_cannot_be_forced_has_a_remedy(asked: dict[str, Any], says: str) -> None:
    with door([]) as there:
        client = OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        with pytest.raises(BadRequestError, match=says):
            client.chat.completions.create(model="any", messages=messages, tools=[LOOK_UP], **asked)  # type: ignore[list-item]


def test_the_remedy_is_one_with_langchain() -> None:
    chat = pytest.importorskip("langchain_openai", reason="pip install -e '.[dev]' brings it")
    pydantic = pytest.importorskip("pydantic")
    parsers = pytest.importorskip("langchain_core.output_parsers")
    shape = pydantic.create_model("Route", where=(str, ...))
    with door(
        ['<tool_call>\n{"name": "Route", "arguments": {"where": "shop"}}\n</tool_call>', "I do not know."]
    ) as there:
        model = chat.ChatOpenAI(model="any", base_url=there.v1, api_key=there.key, max_retries=0)
        route = model.bind_tools([shape]) | parsers.PydanticToolsParser(tools=[shape], first_tool_only=True)
        assert route.invoke(QUESTION) == shape(where="shop") and route.invoke(QUESTION) is None


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize(("content", "kind"), [(None, "null"), (3, "int")])
def test_content_that_is_none_is_told_what_it_may_be(path: str, content: Any, kind: str) -> None:
    said = [{"role": "user", "content": content}]
    body = {"input": said} if path == "responses" else {"messages": said, "max_tokens": 99}
    with door([]) as there:
        client = OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        with pytest.raises(
            BadRequestError, match=rf"\[0\]\.content: must be a text or a list of parts, this is {kind}"
        ):
            client.post(f"/{path}", body=body, cast_to=object)


TOOL: dict[str, Any] = {"name": "f", "description": "g"}


@pytest.mark.parametrize(
    ("path", "tool", "field"),
    [
        ("chat/completions", {"type": "function", "function": {**TOOL, "desciption": "h"}}, "function.desciption"),
        ("chat/completions", {"type": "function", "function": TOOL, "defer_loading": True}, "defer_loading"),
        ("responses", {"type": "function", **TOOL, "parameters": {}, "defer_loading": True}, "defer_loading"),
        ("messages", {**TOOL, "input_schema": {}, "input_examples": [{"x": 1}]}, "input_examples"),
    ],
)
def test_what_a_tool_says_and_the_model_would_not_see_is_refused(path: str, tool: dict[str, Any], field: str) -> None:
    said = [{"role": "user", "content": QUESTION}]
    body = {"input": said} if path == "responses" else {"messages": said, "max_tokens": 99}
    with door(["Six."]) as there:
        client = OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        with pytest.raises(BadRequestError, match=rf"tools\[0\]\.{field}: not supported"):
            client.post(f"/{path}", body={**body, "tools": [tool]}, cast_to=object)
        plain = {key: {**value, "strict": True} if key == "function" else value for key, value in tool.items()}
        plain = {key: value for key, value in plain.items() if key not in ("defer_loading", "input_examples")}
        plain.get("function", plain).pop("desciption", None)
        client.post(f"/{path}", body={**body, "tools": [{**plain, "defer_loading": False}]}, cast_to=object)
