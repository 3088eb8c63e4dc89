"""The agent's side, run by the real controller against the real llama.cpp server behind the real gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from agentlightning.verl.agl_rollout_manager import AglRolloutManager

from ctxguard.testing.llama_cpp import LlamaCppServer
from tests.agl1.conftest import WINDOW
from tests.agl1.rig import Agl1, kinds, marks, tasks

LONG = {"words": 80, "turns": 4}
"""Grows past the window in its third turn."""
SWALLOWED = {**LONG, "on_refusal": "swallow"}

TASKS: Mapping[str, dict[str, Any]] = {
    "good": {"agent": "Guarded", "reward": 0.25},
    "overflow": {"agent": "Guarded", **LONG},
    "overflow, unguarded": {"agent": "Plain", **LONG},
    "overflow, fitted": {"agent": "Fitted", **LONG, "window": WINDOW},
    "swallowed, unguarded": {"agent": "Plain", **SWALLOWED},
    "swallowed": {"agent": "Guarded", **SWALLOWED},
    "swallowed with a reward, unguarded": {"agent": "Plain", **SWALLOWED, "reward_if_swallowed": 1.0},
    "swallowed with a reward": {"agent": "Guarded", **SWALLOWED, "reward_if_swallowed": 1.0},
    "no reward": {"agent": "Guarded", "reward": None},
    "no calls": {"agent": "Idle"},
    "crash": {"agent": "Crashing"},
    "exit": {"agent": "Exiting"},
    "own reward": {"agent": "Fitted", "reward": 0.5, "window": WINDOW},
}


@pytest.fixture(scope="module")
def rollouts(agl1: Agl1, llama_cpp_server: LlamaCppServer) -> dict[str, Any]:
    """What became of each task: one batch, each agent in a process of its own."""
    manager = agl1.manager(AglRolloutManager, "ByTask", [llama_cpp_server.base_url])
    done = manager.enqueue_and_wait_until_completed(tasks(*TASKS.values()), is_train=True)
    names = list(TASKS)
    return {names[rollout.sample_idx_in_step]: rollout for rollout in done}


def test_a_good_rollout_posts_its_reward_once(rollouts: dict[str, Any]) -> None:
    rollout = rollouts["good"]
    assert (rollout.rollout_state, rollout.final_reward) == ("succeeded", 0.25)
    assert kinds(rollout) == ["model_request 200", "reward"]


def test_an_overflow_is_one_mark_and_a_failed_rollout(rollouts: dict[str, Any]) -> None:
    rollout = rollouts["overflow"]
    assert (rollout.rollout_state, rollout.final_reward) == ("failed", None)
    assert kinds(rollout) == ["model_request 200"] * 2 + ["model_request 400", "ctxguard.failed"]
    (mark,) = marks(rollout)
    assert mark["reason"] == "context_overflow"
    assert mark["numbers"]["window"] == WINDOW
    assert mark["numbers"]["prompt_tokens"] > WINDOW
    assert (mark["calls"]["tried"], mark["calls"]["ok"]) == (3, 2)
    assert (mark["rollout_id"], mark["attempt_id"]) == (rollout.rollout_id, "0")


@pytest.mark.parametrize(("case", "reward"), [("swallowed", None), ("swallowed with a reward", 1.0)])
def test_a_swallowed_overflow_fails_whatever_the_agent_returns(
    rollouts: dict[str, Any], case: str, reward: float | None
) -> None:
    unguarded, guarded = rollouts[f"{case}, unguarded"], rollouts[case]
    assert (unguarded.rollout_state, unguarded.final_reward) == ("succeeded", reward)
    assert (guarded.rollout_state, guarded.final_reward) == ("failed", None)
    assert [mark["reason"] for mark in marks(guarded)] == ["swallowed_overflow"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [("no reward", "no_reward"), ("no calls", "no_calls"), ("crash", "exception"), ("exit", "exception")],
)
def test_what_is_no_success_is_marked_once(rollouts: dict[str, Any], case: str, reason: str) -> None:
    rollout = rollouts[case]
    assert (rollout.rollout_state, rollout.final_reward) == ("failed", None)
    assert [mark["reason"] for mark in marks(rollout)] == [reason]


def test_the_agents_own_exception_keeps_type_and_traceback(rollouts: dict[str, Any], agl1: Agl1) -> None:
    assert rollouts["crash"].error_message == "subprocess exited with code 1"
    said = agl1.log()
    trace = said[: said.index("\nLookupError: the tool went away")].rpartition("Traceback (most")[2]
    assert 'raise LookupError("the tool went away")' in trace, "the line of the agent that raised"


def test_an_agent_that_posts_its_own_reward_and_returns_none_succeeds(rollouts: dict[str, Any]) -> None:
    rollout = rollouts["own reward"]
    assert (rollout.rollout_state, rollout.final_reward) == ("succeeded", 0.5)
    assert kinds(rollout) == ["model_request 200", "reward"]


def test_a_task_that_overflows_unguarded_ends_well_guarded(rollouts: dict[str, Any]) -> None:
    unguarded, fitted = rollouts["overflow, unguarded"], rollouts["overflow, fitted"]
    assert (unguarded.rollout_state, unguarded.final_reward) == ("failed", None)
    assert (fitted.rollout_state, fitted.final_reward) == ("succeeded", 1.0)
    assert kinds(fitted) == ["model_request 200"] * 4 + ["reward"]
