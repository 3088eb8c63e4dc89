"""What a tracer sees: nothing of our own requests, and no completion where there was none.

With OpenTelemetry's interface as a double, since it is no dependency; tests/agl/test_tracing.py has the real one.
"""

from __future__ import annotations

import asyncio
import sys
from contextvars import ContextVar
from types import SimpleNamespace

import openai
import pytest

from ctxguard import ContextBudget, ContextOverflowError, DropOldestTurns, Guard, SummarizeOldTurns
from ctxguard.client.tracing import UNANSWERED, name_unanswered_span, untraced
from ctxguard.testing import WindowedServer
from tests.doubles import WordCounter, words

KEY = "suppress_instrumentation-1234"
HISTORY = [
    {"role": "user", "content": "task"},
    *[
        {"role": role, "content": words(100, f"{role}{number}")}
        for number in range(6)
        for role in ("assistant", "user")
    ],
]


class Span:
    def __init__(self, name: str, recording: bool = True) -> None:
        self.name, self.recording = name, recording

    def is_recording(self) -> bool:
        return self.recording

    def update_name(self, name: str) -> None:
        self.name = name


@pytest.fixture
def otel(monkeypatch):
    """``opentelemetry.context`` and ``opentelemetry.trace`` as far as they are used."""
    values: ContextVar[dict] = ContextVar("values")
    values.set({})
    context = SimpleNamespace(
        _SUPPRESS_INSTRUMENTATION_KEY=KEY,
        set_value=lambda key, value, base=None: {**(values.get() if base is None else base), key: value},
        attach=values.set,
        detach=values.reset,
        suppressed=lambda: {key for key, value in values.get().items() if value},
    )
    trace = SimpleNamespace(span=Span("openai.chat.completion"))
    trace.get_current_span = lambda: trace.span
    monkeypatch.setitem(sys.modules, "opentelemetry.context", context)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", trace)
    return SimpleNamespace(context=context, trace=trace)


def test_both_keys_are_set_inside_and_gone_behind(otel):
    with untraced():
        assert otel.context.suppressed() == {KEY, "suppress_instrumentation"}
    assert otel.context.suppressed() == set()
    with pytest.raises(ZeroDivisionError), untraced():
        raise ZeroDivisionError
    assert otel.context.suppressed() == set()


def test_an_older_opentelemetry_without_the_key_is_served(otel):
    del otel.context._SUPPRESS_INSTRUMENTATION_KEY
    with untraced():
        assert otel.context.suppressed() == {"suppress_instrumentation"}


def test_without_opentelemetry_nothing_is_looked_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with untraced():
        name_unanswered_span()


def guarded(server, client_class, watch):
    """A guarded client that says before each request whether tracing is suppressed."""
    strategies = [SummarizeOldTurns(max_summary_tokens=20, keep_last_turns=1), DropOldestTurns()]
    guard = Guard(
        ContextBudget(window=1_000, max_response_tokens=20), counter=WordCounter(), strategies=strategies
    )
    base = f"{server.url}/rollout/ro-1/attempt/at-1/v1"

    class Watched(client_class):
        def _build_request(self, options, **kwargs):
            watch(str(self.base_url), options.json_data["messages"])
            return super()._build_request(options, **kwargs)

    return guard.wrap(Watched(base_url=base, api_key="k"))


@pytest.mark.parametrize("client_class", [openai.OpenAI, openai.AsyncOpenAI])
def test_only_the_summary_is_sent_untraced_and_without_the_rollouts_path(otel, client_class):
    seen = []

    def watch(url, messages):
        seen.append(("/rollout/" in url, bool(otel.context.suppressed()), messages[0]["role"]))

    with WindowedServer(WordCounter(), window=1_000) as server:
        client = guarded(server, client_class, watch)
        answer = client.chat.completions.create(model="m", messages=HISTORY)
        if client_class is openai.AsyncOpenAI:
            asyncio.run(_finish(answer, client))
        else:
            client.close()
    assert seen == [(False, True, "system"), (True, False, "user")]
    assert otel.context.suppressed() == set()


async def _finish(answer, client):
    await answer
    await client.close()


def test_a_call_that_cannot_fit_is_no_completion_in_the_trace(otel):
    with WindowedServer(WordCounter(), window=1_000) as server:
        client = guarded(server, openai.OpenAI, lambda *_: None)
        with client, pytest.raises(ContextOverflowError):
            client.chat.completions.create(
                model="m", messages=[{"role": "system", "content": words(1_200)}, *HISTORY[:1]]
            )
        assert server.completions == []
    assert otel.trace.span.name == UNANSWERED


@pytest.mark.parametrize("span", [Span("my own step"), Span("openai.chat.completion", recording=False)])
def test_other_spans_keep_their_names(otel, span):
    otel.trace.span = span
    name = span.name
    name_unanswered_span()
    assert span.name == name
