"""Trajectory-level aggregation: agents on a real vLLM, their token ids through the real 0.3.0 daemon's merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agentlightning import RolloutLegacy, Triplet
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard import ChatTemplateCounter, ContextBudget
from ctxguard.integrations.accounting import BatchAccount
from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from ctxguard.testing.child_process import free_port
from tests.trajectories import BEHIND, FIRST, SCENARIOS, Rollout, Turn, expected, row_budget, rows_of, run

pytestmark = pytest.mark.vllm

MERGED_WRONGLY = "repeated calls and answers"
"""0.3.0 takes an answer that repeats the last one for a prompt that goes on from it."""


@pytest.fixture(scope="module")
def counter(vllm_server: Any) -> ChatTemplateCounter:
    return ChatTemplateCounter.from_folder(vllm_server.model_folder)


@pytest.fixture(scope="module")
def guarded(vllm_server: Any, counter: ChatTemplateCounter) -> dict[str, Rollout]:
    budget = row_budget(vllm_server.window)
    return {name: run(each, vllm_server.base_url, counter, budget) for name, each in SCENARIOS.items()}


@pytest.fixture(scope="module")
def unguarded(vllm_server: Any, counter: ChatTemplateCounter) -> dict[str, Rollout]:
    return {name: run(each, vllm_server.base_url, counter, None) for name, each in SCENARIOS.items()}


def triplet(turn: Turn) -> Triplet:
    return Triplet(prompt={"token_ids": turn[0]}, response={"token_ids": turn[1]})


def batch_of(
    rollouts: dict[str, Sequence[Turn]],
    level: str = "trajectory",
    first: int = FIRST,
    behind: int = BEHIND,
    kind: type[Any] = AgentModeDaemon,
) -> tuple[Any, dict[str, Any]]:
    """The batch that the real daemon (v0, not started) makes of these rollouts."""
    daemon = kind(
        free_port(),
        train_rollout_n=1,
        train_information={"model": "m"},
        tokenizer=None,
        mini_batch_size=1,
        pad_token_id=0,
        mode="v0",
        trace_aggregator={"level": level},
    )
    daemon._task_id_to_original_sample.update({name: {"data_id": name} for name in rollouts})
    daemon._total_tasks_queued = len(rollouts)
    if kind is not AgentModeDaemon:
        daemon.smallest_group = 1
        daemon._account = BatchAccount({name: name for name in rollouts})
    for name, turns in rollouts.items():
        ended = RolloutLegacy(rollout_id=name, final_reward=1.0, triplets=[triplet(turn) for turn in turns])
        if kind is AgentModeDaemon:
            daemon._completed_rollouts_v0[name] = ended
        else:
            daemon._take(ended, None)
    return daemon.get_train_data_batch(first, behind, torch.device("cpu"), 0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_row_is_cut_or_dropped_and_the_generated_ids_are_trained(name, guarded):
    rollout = guarded[name]
    assert rollout.ended_by is None
    assert rollout.conditional == ""
    assert len(rollout.turns) == SCENARIOS[name].turns * (1 + SCENARIOS[name].repeats)
    rows = rollout.rows
    if name == MERGED_WRONGLY:  # the filter shows the daemon each row as a rollout of its own
        batch, metrics = batch_of({f"{name}#{i}": row for i, row in enumerate(rows)})
    else:
        batch, metrics = batch_of({name: rollout.turns})
    assert rows_of(batch, first=FIRST) == [expected(row) for row in rows]
    assert metrics["training/n_truncated_triplets"] == 0
    trained = [token for row in rows_of(batch, first=FIRST) for token in row.trained]
    assert trained == [token for _, generated in rollout.turns for token in generated]


@pytest.mark.parametrize("name", SCENARIOS)
def test_unguarded_rows_are_cut_or_dropped(name, unguarded):
    batch, metrics = batch_of({name: unguarded[name].turns})
    dropped = sum(row.dropped for row in rows_of(batch, first=FIRST))
    assert metrics["training/n_truncated_triplets"] + dropped > 0


def test_a_compaction_starts_a_row_and_nothing_else_does(guarded):
    for name in ("words", "native calls", "thinking that stays in the prompt"):
        rollout = guarded[name]
        assert rollout.compactions >= 1
        assert len(rollout.rows) == 1 + rollout.compactions


def test_thinking_that_the_template_strips_makes_a_row_of_each_turn(guarded):
    rollout = guarded["thinking that the template strips"]
    assert len(rollout.rows) == len(rollout.turns)
    some = guarded["thinking stripped now and then"]
    assert 1 + some.compactions < len(some.rows) < len(some.turns)


def test_a_row_holds_more_than_its_first_prompt_may(guarded):
    """What the level is for: merged, the calls of a row are trained on with prompts over the limit."""
    longest = max(len(prompt) for prompt, _ in guarded["words"].turns)
    assert FIRST < longest <= FIRST + BEHIND


def test_repeated_answers_are_merged_wrongly_by_the_daemon_alone(guarded):
    """What the filter is for: the base class's own merge gives such a row a mask of another length."""
    rollout = guarded[MERGED_WRONGLY]
    batch, _ = batch_of({"r": rollout.turns})
    trained = [token for row in rows_of(batch, first=FIRST) for token in row.trained]
    assert trained != [token for _, generated in rollout.turns for token in generated]


def test_the_filter_lets_the_daemon_see_each_row_by_itself(guarded):
    """All rollouts in one batch, through the daemon that users run."""
    names = list(SCENARIOS)
    batch, metrics = batch_of({name: guarded[name].turns for name in names}, kind=GuardedDaemon)
    rows = [row for name in names for row in guarded[name].rows]
    assert rows_of(batch, first=FIRST) == [expected(row) for row in rows]
    assert metrics["training/n_truncated_triplets"] == 0
    assert metrics["ctxguard/kept"] == len(names)


def test_at_transition_level_no_call_is_cut_or_dropped(vllm_server, counter, unguarded):
    """There each call is a row, and the budget is the call's."""
    first, behind = 500, 64
    budget = ContextBudget(window=vllm_server.window, max_prompt_tokens=first, max_response_tokens=behind)
    for name in ("words", "thinking stripped now and then"):
        rollout = run(SCENARIOS[name], vllm_server.base_url, counter, budget)
        batch, metrics = batch_of({name: rollout.turns}, "transition", first, behind)
        assert rows_of(batch, first=first) == [expected([turn]) for turn in rollout.turns]
        assert len(rollout.turns) == SCENARIOS[name].turns
        assert metrics["training/n_truncated_triplets"] == 0
        batch, _ = batch_of({name: unguarded[name].turns}, "transition", first, behind)
        assert any(row.dropped for row in rows_of(batch, first=first))
