"""The report's scenario with nothing played: agents in processes of the real controller, behind the real gateway, on a
real vLLM that refuses; and the trainers that are given the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxguard import ChatTemplateCounter
from ctxguard.integrations.agentlightning_v1.manager import GuardedRolloutManager
from tests.agl1.rig import KEY, Agl1, kinds, tasks
from tests.agl1_trainer.bench import Guarded, Unguarded, advantages, config_for
from tests.agl1_trainer.conftest import WINDOW
from tests.vllm.serve import VllmServer

pytestmark = pytest.mark.vllm

GOOD = {"words": 10}
LONG = {"words": 600, "turns": 4}
"""Three good turns, then a prompt of 2,400 tokens."""
TOO_LONG = {"words": 3000}
SWALLOWED = {**LONG, "on_refusal": "swallow"}
N = 2
"""Rollouts of a task."""


def trainer(kind: type[Any], agl1: Agl1, vllm: VllmServer, *batch: Any, val: Any = (), **changes: Any) -> Any:
    lengths = {"data.max_prompt_length": WINDOW, "data.max_response_length": 16}
    config = config_for(agl1, **{"actor_rollout_ref.rollout.n": N, **lengths, **changes})
    return kind(config, [batch], [val] if val else [], [vllm.base_url])


def batch(agent: str) -> list[dict[str, Any]]:
    return [{"agent": agent, **task} for task in (GOOD, LONG, SWALLOWED)]


def rows(trainer: Any) -> list[tuple[float, int]]:
    """Reward and number of rows of each rollout that is trained on."""
    return [(reward, len(advantages)) for reward, advantages in advantages(trainer.trained[0])]


def test_unguarded_failures_are_trained_on_as_reward_zero(agl1: Agl1, vllm_server: VllmServer) -> None:
    both = trainer(Unguarded, agl1, vllm_server, *batch("Plain")[:2])
    metrics = both.step()
    assert rows(both) == [(0.0, 3)] * 2 + [(1.0, 1)] * 2
    assert metrics["training/n_sample"] == 8, "6 of them of failed rollouts"
    assert metrics["training/reward"] == 0.5
    swallowed = trainer(Unguarded, agl1, vllm_server, *batch("Plain")[2:])
    swallowed.step()
    assert rows(swallowed) == [(0.0, 3)] * 2


@pytest.mark.parametrize(
    ("agent", "reasons"),
    [
        ("Plain", {"context_overflow": 2, "swallowed_overflow": 2}),
        ("Guarded", {"context_overflow": 2, "swallowed_overflow": 2}),
    ],
)
def test_guarded_only_good_rollouts_are_trained_on(
    agl1: Agl1, vllm_server: VllmServer, agent: str, reasons: dict[str, int]
) -> None:
    guarded = trainer(Guarded, agl1, vllm_server, *({**task, "window": WINDOW} for task in batch(agent)))
    metrics = guarded.step()
    assert rows(guarded) == [(1.0, 1)] * 2
    assert {reason: metrics[f"ctxguard/failed/{reason}"] for reason in reasons} == reasons
    assert (metrics["ctxguard/queued"], metrics["ctxguard/kept"], metrics["ctxguard/failed"]) == (6, 2, 4)
    assert metrics["training/reward"] == 1.0


def test_with_hooks_only_good_rollouts_are_trained_on(
    agl1: Agl1, vllm_server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_BASE_URL", agl1.url)
    monkeypatch.setenv("AGL_KEY", KEY)
    file = tmp_path / "hooks.py"
    file.write_text("from ctxguard.integrations.agentlightning_v1.hooks import FailedRolloutHooks\n")
    hooked = trainer(Unguarded, agl1, vllm_server, *batch("Plain"), **{"agentlightning.hooks": str(file)})
    hooked.step()
    assert rows(hooked) == [(1.0, 1)] * 2
    assert hooked._hooks.failed == {"context_overflow": 2, "swallowed_overflow": 2}


def test_a_batch_of_failures_stops_the_unguarded_run_and_skips_a_guarded_step(
    agl1: Agl1, vllm_server: VllmServer
) -> None:
    hopeless = {"agent": "Plain", **TOO_LONG}
    with pytest.raises(RuntimeError, match="get_train_data_batch emitted zero training rows"):
        trainer(Unguarded, agl1, vllm_server, hopeless).step()
    assert trainer(Guarded, agl1, vllm_server, hopeless).step() is None

    with pytest.raises(RuntimeError, match="get_test_metrics received zero completed rollouts with trace"):
        trainer(Unguarded, agl1, vllm_server, val=[hopeless])._validate()
    metrics = trainer(Guarded, agl1, vllm_server, val=[hopeless])._validate()
    assert metrics["ctxguard/val/failed/context_overflow"] == 1
    assert metrics["val/reward"] == 0.0


def test_a_guarded_agent_ends_the_task_and_is_trained_on_with_what_was_sent(
    agl1: Agl1, vllm_server: VllmServer
) -> None:
    """The ids of each row's prompt are those of the messages that the guard sent, not of those the agent passed."""
    manager = agl1.manager(GuardedRolloutManager, "Fitted", [vllm_server.base_url])
    (rollout,) = manager.enqueue_and_wait_until_completed(tasks({**LONG, "window": WINDOW}), is_train=True)
    assert (rollout.rollout_state, rollout.final_reward) == ("succeeded", 1.0), agl1.log()
    assert kinds(rollout) == ["model_request 200"] * 4 + ["reward"]
    counter = ChatTemplateCounter.from_folder(vllm_server.model_folder)
    calls = [event["data"] for event in rollout.events if event["event_type"] == "model_request"]
    sent = [counter.ids(call["request"]["messages"]) for call in calls]
    assert [triplet.prompt["token_ids"] for triplet in rollout.triplets] == sent
    lengths = [len(ids) for ids in sent]
    assert max(lengths) < WINDOW
    assert lengths[3] < 4 * 600, "the fourth was made to fit"
    assert [len(triplet.response["token_ids"]) for triplet in rollout.triplets] == [
        call["usage"]["completion_tokens"] for call in calls
    ]
