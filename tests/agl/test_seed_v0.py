"""The report's batches on 0.3.0 in v0 mode, without the filter and with it: real daemon, server, runners, llama.cpp."""

from __future__ import annotations

import pytest
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from tests.agl.seed import LONG, SHORT, Seed


class QuickDaemon(GuardedDaemon):
    poll_seconds, max_quiet_seconds = 0.1, 60.0  # runners take a while to start
    smallest_group = 1  # one rollout of each task


def rewards(batch):
    return batch.batch["token_level_scores"].float().sum(-1).tolist()


def test_a_stale_result_and_a_failed_rollout(llama_cpp_server, capsys):
    """0.3 skips the stale result by itself; the failed rollout it counts as a reward of 0."""
    second = [SHORT, SHORT, SHORT, {**LONG, "tries": 1}]
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second)
        assert "Received unknown rollout ID" in capsys.readouterr().out
        _, metrics = seed.batch()
        assert (metrics["training/reward"], metrics["training/n_rollouts"]) == (0.75, 4)
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second)
        assert "Completed 4/4 tasks (1 failed)..." in capsys.readouterr().out
        batch, metrics = seed.batch()
        assert rewards(batch) == [1.0] * 3
        assert (metrics["training/reward"], metrics["training/n_rollouts"]) == (1.0, 3)
        assert {name: metrics[f"ctxguard/{name}"] for name in ("queued", "kept", "failed", "stale")} == {
            "queued": 4, "kept": 3, "failed": 1, "stale": 1,
        }  # fmt: skip


def test_every_rollout_fails(llama_cpp_server):
    second = [{**LONG, "tries": 1}] * 2
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.run(second)
        with pytest.raises(IndexError, match="argmax"):
            seed.batch()
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.run(second)
        batch, metrics = seed.batch()
        assert rewards(batch) == [0.0] * 2  # placeholders: one mini-batch
        assert (metrics["ctxguard/failed/unmarked"], metrics["ctxguard/kept"]) == (2, 0)
