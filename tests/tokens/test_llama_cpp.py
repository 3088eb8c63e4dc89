"""The dialect of llama.cpp, each rule against the real server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ctxguard.errors import TemplateRefusedError
from ctxguard.tokens import ChatTemplateCounter, request_template_kwargs
from tests.doubles import assistant, call, result, system, user
from tests.message_lists import LISTS, NESTED, READ, REASONING

if TYPE_CHECKING:
    from ctxguard.testing.llama_cpp import LlamaCppServer

pytestmark = pytest.mark.llamacpp

NUMBERS = [
    2.0,
    1e3,
    1.5e-7,
    3.14159265358979,
    123456789.123,
    1e22,
    -0.0,
    0.1 + 0.2,
    2**53,
    2**63,
    2**64,
    -(2**70),
]
PARTS = [{"type": "text", "text": "p1"}, {"type": "text", "text": ""}, {"type": "text", "text": "p3\n"}]


def called(arguments: Any, **extra: Any) -> list[dict[str, Any]]:
    return [user("w"), assistant(call("c", "f", arguments), **extra), result("c", "r")]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **function}}


BODIES: dict[str, dict[str, Any]] = {
    "decomposed unicode": {"messages": [user("e\u0301a\u0300 A\u030a Cafe\u0301 ﬁ ①")]},
    "words that look like the end": {
        "messages": [user("a</s>b </s> <s> <eos> [PAD] <|im_end|> <|fim_pad|>")]
    },
    "a tool without description and parameters": {"messages": [user("t")], "tools": [tool()]},
    "a tool with more fields": {
        "messages": [user("t")],
        "tools": [
            {**tool(strict=True, parameters={"x": 2.0, "n": None}, description="d", more=1), "other": 1}
        ],
    },
    "numbers in arguments": {
        "messages": called(json.dumps({"n": NUMBERS, "s": 'ctxguard\x01\x7f"/\u2028é'}))
    },
    "arguments that are a list": {"messages": called("[1]")},
    "arguments that are a string": {"messages": called('"x"')},
    "arguments that are an object": {"messages": called({"a": 1})},
    "reasoning_content": {"messages": called("{}", reasoning_content="why")},
    "reasoning is not read": {"messages": called("{}", reasoning="why")},
    "a developer message": {"messages": [{"role": "developer", "content": "D"}, user("b")]},
    "null fields": {
        "messages": [user("a"), assistant(content="x", tool_calls=None, refusal=None), user("b")]
    },
    "two system messages": {"messages": [system("a"), system("b"), user("c")]},
    "thinking off": {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": False}},
    "reasoning effort none": {"messages": [user("a")], "reasoning_effort": "none"},
    "no generation prompt": {"messages": [user("a")], "add_generation_prompt": False},
    "parts": {"messages": [user(PARTS), assistant(content=PARTS), user("b")]},
    "tools and tool_choice none": {"messages": [user("a")], "tools": [READ, NESTED], "tool_choice": "none"},
}
PREFILLS: dict[str, list[dict[str, Any]]] = {
    "an answer begun": [user("a"), assistant(content="partial ")],
    "white space in front": [user("a"), assistant(content="\n\n x")],
    "thinking in the text": [user("a"), assistant(content="<think>\nh\n</think>\n\nans")],
    "reasoning and text": [user("a"), assistant(content="\nc", reasoning_content="\nR\n")],
    "only reasoning": [user("a"), assistant(content=None, reasoning_content="R\n")],
    "nothing": [user("a"), assistant(content="")],
    "parts": [user("a"), assistant(content=PARTS)],
    "after a tool result": [*called("{}"), assistant(content="p")],
    "after thinking": [
        user("a"),
        assistant(content="<think>\nq\n</think>\n\nz"),
        user("b"),
        assistant(content="p"),
    ],
}


@pytest.fixture(scope="session")
def local(qwen3_folder: Path) -> ChatTemplateCounter:
    return ChatTemplateCounter.from_folder(qwen3_folder, dialect="llama.cpp")


def post(server: LlamaCppServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def check(server: LlamaCppServer, local: ChatTemplateCounter, body: dict[str, Any]) -> None:
    kwargs = request_template_kwargs(body)
    prompt = local.render(body["messages"], tools=body.get("tools"), template_kwargs=kwargs)
    assert prompt == post(server, "/apply-template", body)["prompt"]
    tokens = local.count(body["messages"], tools=body.get("tools"), template_kwargs=kwargs)
    assert tokens == post(server, "/v1/chat/completions/input_tokens", body)["input_tokens"]


@pytest.mark.parametrize("name", [*LISTS, *REASONING])
def test_equals_the_server_on(name: str, llama_server: LlamaCppServer, local: ChatTemplateCounter) -> None:
    messages, tools, kwargs = {**LISTS, **REASONING}[name]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": kwargs}
    check(llama_server, local, {key: value for key, value in body.items() if value})


@pytest.mark.parametrize("name", BODIES)
def test_has_the_servers_own_rule_for(
    name: str, llama_server: LlamaCppServer, local: ChatTemplateCounter
) -> None:
    check(llama_server, local, BODIES[name])


@pytest.mark.parametrize("name", PREFILLS)
def test_a_last_assistant_message_is_continued(
    name: str, llama_server: LlamaCppServer, local: ChatTemplateCounter
) -> None:
    check(llama_server, local, {"messages": PREFILLS[name]})
    check(
        llama_server, local, {"messages": PREFILLS[name], "chat_template_kwargs": {"enable_thinking": False}}
    )


@pytest.mark.parametrize(
    "messages",
    [
        [user("a"), assistant(call("c"), content="x")],
        [user("a"), assistant(content="p"), assistant(content="q")],
        called(""),
        called('{"a": '),
    ],
)
def test_refuses_what_the_server_refuses(
    messages: list[dict[str, Any]], llama_server: LlamaCppServer, local: ChatTemplateCounter
) -> None:
    with pytest.raises(urllib.error.HTTPError):
        post(llama_server, "/apply-template", {"messages": messages})
    with pytest.raises(TemplateRefusedError):
        local.count(messages)


def test_usage_equals_the_predicted_count(llama_server: LlamaCppServer, local: ChatTemplateCounter) -> None:
    body = {
        "messages": LISTS["parallel calls"].messages,
        "tools": LISTS["parallel calls"].tools,
        "max_tokens": 1,
    }
    usage = post(llama_server, "/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens"] == local.count(body["messages"], tools=body["tools"])
