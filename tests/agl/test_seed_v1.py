"""Failed rollouts on 0.3.0 in v1 mode, without the filter and with it: the real store, LLM proxy, runner, daemon, and
vLLM refusing for real."""

from __future__ import annotations

import pytest
import torch
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from tests.agl.rig import V1Rig, columns

GOOD = {"turns": 1, "words": 20, "grow": 0, "reward": 1.0, "ends": "well"}
OVERFLOW = {**GOOD, "turns": 4, "grow": 900}
"""Two good turns, perhaps three; then the prompt is more than the window of 2048 tokens."""


class QuickDaemon(GuardedDaemon):
    poll_seconds, max_quiet_seconds = 0.1, 60.0  # runners take a while to start


def daemon_before(vllm_server, kind):
    with (
        V1Rig(vllm_server.base_url, daemon_class=kind, rollouts_per_task=2) as rig,
        rig.runners("tests.agl.seed_agent_v1:agent", processes=2),
    ):
        yield rig.daemon, rig.backend


@pytest.fixture(scope="module")
def unguarded(vllm_server):
    yield from daemon_before(vllm_server, AgentModeDaemon)


@pytest.fixture(scope="module")
def guarded(vllm_server):
    yield from daemon_before(vllm_server, QuickDaemon)


def run(part, tasks, *, is_train=True):
    """One batch through the real parts; returns the daemon."""
    daemon, backend = part
    daemon.set_up_data_and_server(columns(tasks), [backend], is_train=is_train)
    daemon.run_until_all_finished()
    return daemon


def batch_of(daemon):
    return daemon.get_train_data_batch(2048, 64, torch.device("cpu"), 0)


def rewards(batch):
    return batch.batch["token_level_scores"].float().sum(-1).tolist()


def test_a_rollout_that_fails_after_good_turns(unguarded, guarded):
    tasks = [GOOD, OVERFLOW]
    batch, metrics = batch_of(run(unguarded, tasks))
    assert sorted(rewards(batch)) == [0.0] * 6 + [1.0] * 2  # three of four rows are of failed rollouts
    assert metrics["training/reward"] == 0.5
    daemon = run(guarded, tasks)
    batch, metrics = batch_of(daemon)
    assert rewards(batch) == [1.0] * 2
    assert metrics["training/reward"] == 1.0
    assert (metrics["ctxguard/kept"], metrics["ctxguard/failed/unmarked"]) == (2, 2)
    assert all(len(daemon._completed_rollouts_v0[r].triplets) == 3 for r in daemon._account.failures)


def test_every_rollout_fails(unguarded, guarded):
    with pytest.raises(IndexError, match="argmax"):
        batch_of(run(unguarded, [{**GOOD, "words": 4000}]))
    batch, metrics = batch_of(run(guarded, [{**GOOD, "words": 4000}, {**GOOD, "ends": "crash"}]))
    assert rewards(batch)[:2] == [0.0] * 2
    assert (metrics["ctxguard/failed"], metrics["ctxguard/trained_rollouts"]) == (4, 0)


def test_validation(unguarded, guarded):
    tasks = [GOOD, {**GOOD, "reward": 0.5}, OVERFLOW]
    metrics = run(unguarded, tasks, is_train=False).get_test_metrics()
    assert metrics["val/reward"] == 0.5
    metrics = run(guarded, tasks, is_train=False).get_test_metrics()
    assert metrics["val/reward"] == 0.75
    assert metrics["ctxguard/val/reward_with_failures_filled"] == 0.5
