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
"""Two good turns; the third prompt is more than the window of 2048 tokens."""


class QuickDaemon(GuardedDaemon):
    poll_seconds = 0.1


def run(vllm_server, kind, tasks, *, is_train=True):
    """One batch through the real parts; returns the daemon."""
    with (
        V1Rig(vllm_server.base_url, daemon_class=kind, rollouts_per_task=2) as rig,
        rig.runners("tests.agl.seed_agent_v1:agent", processes=2),
    ):
        rig.daemon.set_up_data_and_server(columns(tasks), [rig.backend], is_train=is_train)
        rig.daemon.run_until_all_finished()
    return rig.daemon


def batch_of(daemon):
    return daemon.get_train_data_batch(2048, 64, torch.device("cpu"), 0)


def rewards(batch):
    return batch.batch["token_level_scores"].float().sum(-1).tolist()


def test_a_rollout_that_fails_after_good_turns(vllm_server):
    tasks = [GOOD, OVERFLOW]
    batch, metrics = batch_of(run(vllm_server, AgentModeDaemon, tasks))
    assert sorted(rewards(batch)) == [0.0] * 6 + [1.0] * 2  # three of four rows are of failed rollouts
    assert metrics["training/reward"] == 0.5
    daemon = run(vllm_server, QuickDaemon, tasks)
    batch, metrics = batch_of(daemon)
    assert rewards(batch) == [1.0] * 2
    assert metrics["training/reward"] == 1.0
    assert (metrics["ctxguard/kept"], metrics["ctxguard/failed/unmarked"]) == (2, 2)
    assert all(len(daemon._completed_rollouts_v0[r].triplets) == 3 for r in daemon._account.failures)


def test_every_rollout_fails(vllm_server):
    tasks = [{**OVERFLOW, "words": 4000}, {**GOOD, "ends": "crash"}]
    with pytest.raises(IndexError, match="argmax"):
        batch_of(run(vllm_server, AgentModeDaemon, tasks[:1]))
    batch, metrics = batch_of(run(vllm_server, QuickDaemon, tasks))
    assert rewards(batch) == [0.0] * 2
    assert (metrics["ctxguard/failed"], metrics["ctxguard/placeholder_rows"]) == (4, 2)


def test_validation(vllm_server):
    tasks = [GOOD, {**GOOD, "reward": 0.5}, OVERFLOW]
    unguarded = run(vllm_server, AgentModeDaemon, tasks, is_train=False).get_test_metrics()
    guarded = run(vllm_server, QuickDaemon, tasks, is_train=False).get_test_metrics()
    assert (unguarded["val/reward"], guarded["val/reward"]) == (0.5, 0.75)
    assert guarded["ctxguard/val/reward_with_failures_filled"] == 0.5
