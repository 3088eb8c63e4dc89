"""What the gateway records: each call of the agent once, and nothing that is the guard's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agentlightning.verl.agl_rollout_manager import AglRolloutManager

from ctxguard import ChatTemplateCounter, ContextBudget, ServerUnavailableError
from ctxguard.integrations.agentlightning_v1 import Gateway
from ctxguard.integrations.agentlightning_v1.manager import GuardedRolloutManager
from ctxguard.scope import ids_from_url, server_identity
from ctxguard.testing import WindowedServer
from ctxguard.testing.tiny_model import cache_folder, write_tokenizer
from tests.agl1.rig import KEY, Agl1, kinds, marks, tasks

MODEL = "tiny-qwen3"
SUMMARY = "You keep the notes of an agent"


def answer(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    return "All went well." if messages[0]["content"].startswith(SUMMARY) else "ok"


@pytest.fixture
def backend() -> Any:
    """A server that keeps the requests that it gets; window 256."""
    counter = ChatTemplateCounter.from_folder(write_tokenizer(cache_folder()))
    with WindowedServer(counter, window=256, model=answer, model_name=MODEL) as server:
        yield server


def test_the_base_url_of_a_rollout_is_read_right(server_only: Agl1, monkeypatch: pytest.MonkeyPatch) -> None:
    """The URL that the controller builds (1.0.2 ``local_reconciler.py``, ``_spawn_for``)."""
    url = f"{server_only.url}/proxy/rollout/f00/attempt/0/mode/train/openai/v1"
    assert ids_from_url(url) == ("f00", "0")
    other = f"{server_only.url}/proxy/rollout/ba2/attempt/0/mode/train/openai/v1"
    assert server_identity(url) == server_identity(other), "what is learnt in one rollout helps the next"
    monkeypatch.setenv("AGL_OPENAI_BASE_URL", url)
    monkeypatch.setenv("AGL_EVENT_URL", f"{server_only.url}/api/rollouts/f00/attempt/0/events")
    gateway = Gateway.from_environment()
    assert (gateway.rollout_id, gateway.attempt_id) == ("f00", "0")


def test_summaries_go_to_the_model_itself_and_leave_no_event(agl1: Agl1, backend: WindowedServer) -> None:
    manager = agl1.manager(GuardedRolloutManager, "Summarizing", [backend.base_url])
    long = {"words": 50, "turns": 5, "window": 256}
    (rollout,) = manager.enqueue_and_wait_until_completed(tasks(long), is_train=True)
    assert rollout.rollout_state == "succeeded", agl1.log()
    requests = backend.requests
    summaries = [body for body in requests if body["messages"][0]["content"].startswith(SUMMARY)]
    assert len(summaries) >= 1
    assert {body["model"] for body in summaries} == {MODEL}, (
        "the agent said 'auto', which only the gateway knows"
    )
    assert len(requests) - len(summaries) == 5
    assert kinds(rollout) == ["model_request 200"] * 5 + ["reward"]
    recorded = [
        event["data"]["request"] for event in rollout.events if event["event_type"] == "model_request"
    ]
    assert not any(SUMMARY in json.dumps(request) for request in recorded)
    assert any(
        "<summary_of_earlier_turns>\nAll went well." in json.dumps(r).replace("\\n", "\n") for r in recorded
    )


def test_without_a_way_to_the_model_a_summary_is_given_up_and_leaves_no_event(
    agl1: Agl1, backend: WindowedServer
) -> None:
    """The gateway has no route without a rollout: it answers 404, and the next strategy takes over."""
    manager = agl1.manager(AglRolloutManager, "Summarizing", [backend.base_url])
    long = {"words": 50, "turns": 5, "window": 256}
    (rollout,) = manager.enqueue_and_wait_until_completed(tasks(long), is_train=True)
    assert rollout.rollout_state == "succeeded", agl1.log()
    assert kinds(rollout) == ["model_request 200"] * 5 + ["reward"]
    assert not any(body["messages"][0]["content"].startswith(SUMMARY) for body in backend.requests)


def test_a_refusal_before_sending_leaves_only_the_mark(agl1: Agl1, backend: WindowedServer) -> None:
    manager = agl1.manager(AglRolloutManager, "Fitted", [backend.base_url])
    (rollout,) = manager.enqueue_and_wait_until_completed(tasks({"words": 600, "window": 256}), is_train=True)
    assert rollout.rollout_state == "failed"
    assert kinds(rollout) == ["ctxguard.failed"]
    (mark,) = marks(rollout)
    assert (mark["reason"], mark["numbers"]["attempts"]) == ("context_overflow", 0)
    assert backend.requests == []


def test_the_trainer_tells_its_agents_their_budget(agl1: Agl1, backend: WindowedServer) -> None:
    """No window is given and the gateway tells none: the first guard has nothing to go by, the second is told."""
    no_window = {"words": 80, "turns": 4, "window": None}
    backend.tells_window = False
    manager = agl1.manager(AglRolloutManager, "Fitted", [backend.base_url])
    (untold,) = manager.enqueue_and_wait_until_completed(tasks(no_window), is_train=True)
    assert [mark["detail"].partition(":")[0] for mark in marks(untold)] == ["WindowUnknownError"]

    manager = agl1.manager(GuardedRolloutManager, "Fitted")
    manager.told = manager.told.__class__(budget=ContextBudget(window=256, max_prompt_tokens=200))
    manager.register_model([backend.base_url])
    (told,) = manager.enqueue_and_wait_until_completed(tasks(no_window), is_train=True)
    assert (told.rollout_state, kinds(told)) == ("succeeded", ["model_request 200"] * 4 + ["reward"])
    prompts = [
        record.prompt_tokens for record in backend.records if record.status == 200 and record.prompt_tokens
    ]
    assert max(prompts) <= 200


def test_the_window_is_asked_of_the_model_server_where_the_trainer_tells_it(
    agl1: Agl1, backend: WindowedServer
) -> None:
    manager = agl1.manager(GuardedRolloutManager, "Fitted", [backend.base_url])
    long = {"words": 80, "turns": 4, "window": None}
    (rollout,) = manager.enqueue_and_wait_until_completed(tasks(long), is_train=True)
    assert (rollout.rollout_state, kinds(rollout)) == ("succeeded", ["model_request 200"] * 4 + ["reward"])
    assert "/v1/models" in [record.path for record in backend.records]


def test_a_wrong_key_is_said(server_only: Agl1) -> None:
    manager = server_only.manager(AglRolloutManager, "Idle")
    (rollout,) = manager._create_rollouts(tasks({}), is_train=True)
    path = f"{server_only.url}/api/rollouts/{rollout.rollout_id}/attempt/0/events"
    Gateway("", path, KEY).post("reward", {"value": 1.0})
    with pytest.raises(ServerUnavailableError, match=r"status 401, try 1 of 3.*AGL_KEY"):
        Gateway("", path, "wrong").post("reward", {"value": 1.0})
    assert Gateway("", path, KEY).posted_reward() == 1.0
