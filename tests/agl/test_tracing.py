"""What the real tracers, the real LLM proxy and the real adapters of 0.3 make of guarded calls, on the real vLLM.

A summary call leaves no span and no triplet; a call that was refused before it was sent makes no triplet; the sent
messages are on the span when asked for, and not otherwise.
"""

from __future__ import annotations

import functools
import json
from collections import Counter

import pytest

from ctxguard.client.tracing import UNANSWERED
from ctxguard.integrations.agentlightning.sent import SENT_MESSAGES, SENT_SPAN, SENT_TOKENS
from tests.agl.rig import V1Rig, posted

TASKS = [
    {"id": "summarize", "do": "summarize"},
    {"id": "recorded", "do": "compact", "record": True},
    {"id": "not recorded", "do": "compact"},
    {"id": "refuse", "do": "refuse"},
]
CALLS = {"summarize": 7, "recorded": 3, "not recorded": 3, "refuse": 2}
"""Calls of the agent that are answered; summaries come on top."""


@pytest.fixture(scope="module")
def rig(vllm_server):
    with V1Rig(vllm_server.base_url) as rig:
        yield rig


@pytest.fixture(
    scope="module", params=[("agent", "otel"), ("agent", "agentops"), ("async_agent", "agentops")]
)
def traced(request, rig, qwen3_folder, tmp_path_factory):
    """The rollouts of one agent under one tracer: tracer, ids by task, and what was sent."""
    agent, tracer = request.param
    reports = tmp_path_factory.mktemp("reports") / "sent.jsonl"
    environment = {"CTXGUARD_TOKENIZER": str(qwen3_folder), "CTXGUARD_REPORTS": str(reports)}
    with rig.runners(f"tests.agl.tracing_agents:{agent}", tracer=tracer, environment=environment) as runners:
        ids = rig.enqueue(TASKS)
        ended = rig.wait(ids, 120)
        assert {rollout.status for rollout in ended.values()} == {"succeeded"}, runners.output()[-5000:]
    sent = [json.loads(line) for line in reports.read_text().splitlines()]
    return tracer, dict(zip((task["id"] for task in TASKS), ids, strict=True)), sent


def triplets_of(rig, tracer, rollout_id):
    """What the adapter that goes with the tracer makes of it: the tracer's own spans, or the proxy's."""
    from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet

    adapter = TracerTraceToTriplet() if tracer == "agentops" else LlmProxyTraceToTriplet()
    return rig.triplets(rollout_id, adapter)


@functools.cache
def tokenizer_in(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def ids_of(folder, messages):
    """Token ids of a prompt, by the served model's own template."""
    tokenizer = tokenizer_in(folder)
    template = (folder / "chat_template.jinja").read_text()
    return list(
        tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=True
        )
    )


def test_a_summary_leaves_no_span_and_no_triplet(rig, traced):
    tracer, ids, sent = traced
    paths = [report["path"] for report in sent if report["task"] == "summarize"]
    assert "compacted" in paths
    last = [report["sent"] for report in sent if report["task"] == "summarize"][-1]
    assert "<summary_of_earlier_turns>\nnotes: " in last[0]["content"]  # a model was asked
    names = Counter(span.name for span in rig.spans(ids["summarize"]))
    assert names["Received Proxy Server Request"] == CALLS["summarize"]  # the proxy's
    assert names["openai.chat.completion"] == (CALLS["summarize"] if tracer == "agentops" else 0)
    assert len(triplets_of(rig, tracer, ids["summarize"])) == CALLS["summarize"]


def test_the_triplets_are_those_of_what_was_sent(rig, traced, qwen3_folder):
    tracer, ids, sent = traced
    for task, rollout_id in ids.items():
        histories = [report["sent"] for report in sent if report["task"] == task]
        triplets = triplets_of(rig, tracer, rollout_id)
        assert len(triplets) == len(histories) == CALLS[task]
        for triplet, history in zip(triplets, histories, strict=True):
            assert triplet.prompt["token_ids"] == ids_of(qwen3_folder, history)
            assert len(triplet.response["token_ids"]) > 0
        assert triplets[-1].reward == 1.0


def test_a_refusal_before_sending_makes_no_triplet(rig, traced):
    tracer, ids, _ = traced
    spans = rig.spans(ids["refuse"])
    names = Counter(span.name for span in spans)
    assert names["Received Proxy Server Request"] == CALLS["refuse"]
    assert names[UNANSWERED] == (1 if tracer == "agentops" else 0)
    assert len(triplets_of(rig, tracer, ids["refuse"])) == CALLS["refuse"]


def test_the_sent_messages_are_on_the_span_when_asked_for(rig, traced):
    tracer, ids, sent = traced
    expected = [
        report["sent"] for report in sent if report["task"] == "recorded" and report["path"] == "compacted"
    ]
    assert len(expected) == 1
    recorded = [span for span in rig.spans(ids["recorded"]) if SENT_MESSAGES in span.attributes]
    assert [json.loads(span.attributes[SENT_MESSAGES]) for span in recorded] == expected
    assert {span.name for span in recorded} == {
        "openai.chat.completion" if tracer == "agentops" else SENT_SPAN
    }
    assert recorded[0].attributes[SENT_TOKENS] < 2048
    for other in ("summarize", "not recorded", "refuse"):
        assert not [span for span in rig.spans(ids[other]) if SENT_MESSAGES in span.attributes]


@pytest.mark.parametrize("version", ["0.3.0", "0.1.2"])
def test_a_summary_leaves_no_triplet_in_v0_mode(version, vllm_server, qwen3_folder, tmp_path):
    """There the runner makes the triplets, of the spans of its own tracer."""
    reports = tmp_path / "sent.jsonl"
    result = posted(
        version,
        vllm_server.base_url,
        "tests.agl.tracing_agents:Agent",
        "",
        json.dumps([{"id": "summarize", "do": "summarize"}]),
        "train",
        "agentops",
        environment={"CTXGUARD_TOKENIZER": str(qwen3_folder), "CTXGUARD_REPORTS": str(reports)},
    )
    sent = [json.loads(line)["sent"] for line in reports.read_text().splitlines()]
    assert "<summary_of_earlier_turns>\nnotes: " in sent[-1][0]["content"]  # a model was asked
    (rollout,) = result["rollouts"]
    assert (rollout["triplets"], rollout["reward"]) == (CALLS["summarize"], 1.0), result["log"][-3000:]
