"""The agent's side under the real runner: what fails is marked once and reported as failed, what succeeds is not."""

from __future__ import annotations

import json

import pytest

from ctxguard.integrations.marks import SPAN_ATTRIBUTE, SPAN_NAME, FailureMark
from tests.agl.rig import V1Rig, posted

HOOK = "ctxguard.integrations.agentlightning:FailureMarkHook"
CLIENT = "ctxguard.integrations.agentlightning:MarkingClient"
TASKS = {
    "reward": "",
    "none": "no_reward",
    "no call": "no_calls",
    "raise": "exception",
    "overflow": "context_overflow",
    "swallow": "swallowed_overflow",
}
"""What a task has the agent do → the reason with which its rollout fails, "" for a success."""


@pytest.fixture(scope="module")
def rig(llama_cpp_server):
    """The store and the proxy of 0.3 before the real llama.cpp."""
    with V1Rig(llama_cpp_server.base_url) as rig:
        yield rig


@pytest.fixture
def environment(qwen3_folder):
    return {"CTXGUARD_TOKENIZER": str(qwen3_folder)}


def marks_in_trace(rig, rollout_id):
    spans = [span for span in rig.spans(rollout_id) if span.name == SPAN_NAME]
    return [FailureMark.from_json(span.attributes[SPAN_ATTRIBUTE]) for span in spans]


# v1 mode


@pytest.mark.parametrize(
    ("agent", "tracer", "hooks", "mode"),
    [
        ("function_agent", "otel", (), "train"),
        ("async_agent", "agentops", (HOOK,), "train"),
        ("Agent", "otel", (HOOK,), "val"),
        ("TwoModes", "agentops", (HOOK,), "train"),
    ],
)
def test_each_rollout_ends_once(rig, environment, agent, tracer, hooks, mode):
    options = {"hooks": hooks, "tracer": tracer, "environment": environment}
    with rig.runners(f"tests.agl.marked_agents:{agent}", **options) as runners:
        ids = rig.enqueue([{"do": do} for do in TASKS], mode=mode)
        ended = rig.wait(ids)
        log = runners.output()
    for rollout_id, reason in zip(ids, TASKS.values(), strict=True):
        attempt = rig.attempt(rollout_id)
        expected = "failed" if reason else "succeeded"
        assert (ended[rollout_id].status, attempt.status) == (expected, expected), reason
        marks = marks_in_trace(rig, rollout_id)
        assert [mark.reason for mark in marks] == [reason] * bool(reason)
        in_metadata = FailureMark.in_metadata(attempt.metadata)
        assert in_metadata == (marks[0] if marks and hooks else None)
        if marks:
            assert (marks[0].rollout_id, marks[0].attempt_id) == (rollout_id, attempt.attempt_id)
            assert marks[0].calls["ok"] == (0 if reason == "no_calls" else 1)
            if "overflow" in reason:
                assert marks[0].numbers["prompt_tokens"] > marks[0].numbers["limit"] > 1_500
    assert "MyError: the tool broke" in log  # its type and traceback …
    assert ", in finish" in log
    assert "OpenAIContextOverflowError" in log
    assert "RolloutFailedError" in log


def test_unmarked_the_same_failures_go_out_as_successes(rig, environment):
    """What this is about: a swallowed overflow and a reward of None are successes to the runner."""
    with rig.runners("tests.agl.marked_agents:Unmarked", environment=environment):
        ids = rig.enqueue([{"do": do} for do in TASKS])
        ended = rig.wait(ids)
    statuses = dict(zip(TASKS, (ended[rollout_id].status for rollout_id in ids), strict=True))
    assert [do for do, status in statuses.items() if status == "failed"] == ["raise", "overflow"]
    assert not any(marks_in_trace(rig, rollout_id) for rollout_id in ids)


def test_an_emitted_reward_is_a_reward(rig, environment):
    with rig.runners("tests.agl.marked_agents:Agent", environment=environment):
        (rollout_id,) = ids = rig.enqueue([{"do": "emit"}])
        assert rig.wait(ids)[rollout_id].status == "succeeded"
    from agentlightning.emitter.reward import find_final_reward

    assert find_final_reward(rig.spans(rollout_id)) == 0.75


# v0 mode and 0.1.2


@pytest.mark.parametrize(
    ("version", "agent", "client"),
    [
        ("0.3.0", "Agent", ""),
        ("0.3.0", "TwoModes", ""),
        ("0.3.0", "function_agent", CLIENT),
        ("0.1.2", "Agent012", CLIENT),
        ("0.1.2", "Async012", CLIENT),
    ],
)
def test_each_posted_rollout_says_why_it_failed(llama_cpp_server, environment, version, agent, client):
    result = post(llama_cpp_server, environment, version, agent, client, [{"do": do} for do in TASKS])
    for rollout, reason in zip(result["rollouts"], TASKS.values(), strict=True):
        mark = FailureMark.in_metadata(rollout["metadata"])
        if not reason:
            assert (mark, rollout["reward"]) == (None, 1.0)  # the agent returned an int
            continue
        assert (mark.reason, mark.rollout_id, mark.attempt_id) == (reason, rollout["rollout_id"], None)
        assert (rollout["reward"], rollout["triplets"]) == (None, None)
        assert mark.calls["ok"] == (0 if reason == "no_calls" else 1)
    assert "MyError: the tool broke" in result["log"]


def test_validation_of_0_1_2_is_marked_too(llama_cpp_server, environment):
    result = post(llama_cpp_server, environment, "0.1.2", "Agent012", CLIENT, [{"do": "reward"}], "val")
    assert FailureMark.in_metadata(result["rollouts"][0]["metadata"]).reason == "no_calls"


def test_triplets_that_are_returned_arrive(llama_cpp_server, environment):
    tasks = [{"do": "triplets"}, {"do": "rollout"}, {"do": "without reward"}]
    result = post(llama_cpp_server, environment, "0.3.0", "ReturnsTriplets", "", tasks)
    rewarded, whole, without = result["rollouts"]
    assert (rewarded["reward"], rewarded["triplets"], rewarded["metadata"]) == (1.0, 2, {})
    assert (whole["reward"], whole["triplets"], whole["metadata"]) == (0.5, 2, {})
    assert (without["reward"], without["triplets"]) == (None, None)
    assert FailureMark.in_metadata(without["metadata"]).reason == "no_reward"


def post(server, environment, version, agent, client, tasks, mode="train"):
    """What the runner of a version posts to the server of that version."""
    agent = f"tests.agl.marked_agents:{agent}"
    return posted(version, server.base_url, agent, client, json.dumps(tasks), mode, environment=environment)
