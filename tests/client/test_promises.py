"""The promises of DESIGN.md through the wrapped client, with the real Qwen3 template and a real HTTP server.

The manager's own properties: tests/manager/test_promises.py. Here each example drives a whole rollout, with
ledger entries evicted on the way.
"""

from __future__ import annotations

import copy

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxguard import ChatTemplateCounter, ContextBudget, ContextOverflowError, Guard
from ctxguard.events import Answered, Counted, Failed, Refused
from ctxguard.history import Ledger
from ctxguard.manager import call_points
from ctxguard.messages import check_messages
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.conversations import TOOLS, conversations

WINDOW = 2_048
RESERVE = 256


@pytest.fixture(scope="module")
def counter(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder)


@pytest.fixture(scope="module")
def server(counter):
    with WindowedServer(counter, window=WINDOW, model=ScriptedModel(lambda messages, tools: "ok")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    yield client
    client.close()


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(
    messages=conversations(max_turns=10, max_result_repeat=80),
    believed=st.sampled_from([WINDOW, WINDOW + 200, 8 * WINDOW]),
    capacity=st.sampled_from([1, 3, 65_536]),
)
def test_a_whole_rollout_keeps_every_promise(counter, server, client, messages, believed, capacity):
    events = []
    budget = ContextBudget(window=believed, max_response_tokens=RESERVE)
    guard = Guard(budget, counter=counter, on_event=events.append, ledger=Ledger(max_entries=capacity))
    guarded = guard.wrap(client)
    before = copy.deepcopy(messages)
    former: list[object] = []
    with guard.scope("r") as scope:
        for end in call_points(messages):
            history, events[:] = messages[:end], []
            first = len(server.requests)
            failure = None
            try:
                guarded.chat.completions.create(model="m", messages=history, tools=TOOLS, max_tokens=RESERVE)
            except ContextOverflowError as error:
                failure = error
            requests = server.requests[first:]
            assert messages == before  # harmless

            sizes = [counter.count(r["messages"], tools=r["tools"]) for r in requests]
            assert len(sizes) <= guard.max_attempts  # bounded
            assert sizes == sorted(set(sizes), reverse=True)

            if failure is not None:  # never silent
                assert scope.failure is not None
                assert isinstance(events[-1], Failed)
                assert failure.prompt_tokens > failure.limit
                former = []
                continue

            sent = requests[-1]["messages"]
            # it fits: what the server told it, or else what it was told (vLLM lowers max_tokens in silence)
            known = WINDOW if scope.calls.refused else believed
            assert sizes[-1] + RESERVE <= known
            assert requests[-1]["max_tokens"] == RESERVE
            answered = events[-1]
            assert isinstance(answered, Answered)
            assert answered.predicted_tokens == answered.served_tokens == sizes[-1]

            assert check_messages(sent) == check_messages(history)  # valid
            lead = 2 if history[0]["role"] == "system" else 1
            assert sent[:lead] == history[:lead]

            compacted = any(event.kind == "compacted" for event in events)
            if not compacted:  # stable
                assert sent[: len(former)] == former
            counted = [event for event in events if isinstance(event, Counted)][-1]
            assert (counted.path == "untouched") == (sent == history)
            assert sum(isinstance(event, Refused) for event in events) == len(requests) - 1
            former = sent
