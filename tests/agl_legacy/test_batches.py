"""What a batch with failed rollouts trains on, on 0.1.2: its real daemon and verl's real GRPO."""

from __future__ import annotations

import pytest

from ctxguard.integrations.agentlightning.legacy import PER_ROLLOUT, LegacyDaemon
from ctxguard.integrations.agentlightning.steps import StepSkipped
from tests.agl.batches import Result, advantages, batch_of, daemon_with, overflow
from tests.agl.seed import SHORT, Seed, task

GOOD, BAD = Result(1.0), Result(0.0)
HALF = round(0.5 / 2**-0.5, 3)
"""0.707: (1 - 0.5) / std of (1, 0)."""


def test_failed_rollouts_and_groups_left_too_small_are_not_trained_on():
    tasks = [[GOOD, BAD, overflow(turns=2), overflow()], [GOOD, overflow(), overflow(turns=3), overflow()]]
    batch, metrics = batch_of(daemon_with(LegacyDaemon, tasks))
    assert advantages(batch) == {"t0r0": [HALF], "t0r1": [-HALF]}
    assert (metrics["ctxguard/failed/context_overflow"], metrics["ctxguard/small_group_rollouts"]) == (5, 1)


def test_a_rollout_of_three_rows_counts_once_per_rollout():
    batch, _ = batch_of(daemon_with(LegacyDaemon, [[Result(1.0, turns=3), GOOD, BAD, BAD]]))
    assert advantages(batch, PER_ROLLOUT) == {
        "t0r0": [0.866] * 3, "t0r1": [0.866], "t0r2": [-0.866], "t0r3": [-0.866],
    }  # fmt: skip


def test_failures_are_handled_as_chosen():
    class Penalizes(LegacyDaemon):
        failure_handling = "penalize(-2)"

    batch, _ = batch_of(daemon_with(Penalizes, [[GOOD, BAD, overflow(turns=2), overflow()]]))
    rewards = batch.batch["token_level_scores"].float().sum(-1).tolist()
    assert dict(zip(batch.non_tensor_batch["rollout_id_list"], rewards, strict=True)) == {
        "t0r0": 1.0, "t0r1": 0.0, "t0r2": -2.0,
    }  # fmt: skip


def test_a_thin_step_is_skipped():
    daemon = daemon_with(LegacyDaemon, [[GOOD, BAD, overflow()]])
    daemon.rows_needed = 3
    with pytest.raises(StepSkipped) as caught:
        batch_of(daemon)
    assert (caught.value.args[0]["ctxguard/rows"], caught.value.args[0]["ctxguard/failed"]) == (2, 1)


def test_a_rollout_that_never_returns_ends_as_failed(llama_cpp_server):
    class Impatient(LegacyDaemon):
        poll_seconds, max_quiet_seconds, smallest_group = 0.1, 15.0, 1  # runners take a while to start

    with Seed(llama_cpp_server.base_url, Impatient) as seed:
        seed.run([SHORT, SHORT, task(think=60)])
        _, metrics = seed.batch()
    assert (metrics["ctxguard/kept"], metrics["ctxguard/failed/not_returned"]) == (2, 1)
