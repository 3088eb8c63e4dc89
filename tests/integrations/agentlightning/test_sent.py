"""The sent messages on the span, when asked for; tests/agl/test_tracing.py has the real tracers."""

from __future__ import annotations

import json

from ctxguard import ContextBudget, Guard
from ctxguard.integrations.agentlightning import guarded_client, record_sent
from ctxguard.integrations.agentlightning.sent import SENT_MESSAGES, SENT_SPAN, SENT_TOKENS
from ctxguard.testing import WindowedServer
from tests.doubles import WordCounter, words
from tests.integrations.agentlightning.fakes import LLM, Tracer, activate

SHORT = [{"role": "user", "content": "hello"}]
LONG = [
    {"role": "user", "content": "task"},
    {"role": "assistant", "content": words(60)},
    {"role": "user", "content": words(60, "x")},
    {"role": "assistant", "content": words(60, "y")},
    {"role": "user", "content": "go on"},
]


def send(*histories, **options):
    guard = Guard(ContextBudget(window=200, max_response_tokens=20), counter=WordCounter(), **options)
    with WindowedServer(WordCounter(), window=200) as server:
        with guarded_client(LLM(server.base_url), guard=guard) as client:
            for history in histories:
                client.chat.completions.create(model="m", messages=history)
        return server.completions


def test_only_what_was_changed_is_recorded_as_it_was_sent(monkeypatch):
    tracer = activate(monkeypatch, Tracer())
    sent = send(SHORT, LONG, on_report=record_sent)
    assert [span.name for span in tracer.spans] == [SENT_SPAN]
    attributes = tracer.spans[0].attributes
    assert json.loads(attributes[SENT_MESSAGES]) == sent[1].body["messages"] != LONG
    assert attributes[SENT_TOKENS] == sent[1].prompt_tokens


def test_nothing_is_recorded_unless_asked_for(monkeypatch):
    tracer = activate(monkeypatch, Tracer())
    send(LONG)
    assert tracer.spans == []


def test_without_a_trace_nothing_happens():
    assert send(LONG, on_report=record_sent)[0].status == 200
