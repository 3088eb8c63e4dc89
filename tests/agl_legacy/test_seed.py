"""The reported crash on the reported version, then the same batches with the filter. Real daemon, server, runners
and llama.cpp; each test fails first, as reported."""

from __future__ import annotations

import pytest
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard.integrations.agentlightning.legacy import LegacyDaemon
from tests.agl.seed import LONG, SHORT, Seed, task

QUICK = [SHORT] * 4


class QuickDaemon(LegacyDaemon):
    poll_seconds, max_quiet_seconds = 0.1, 60.0  # runners take a while to start
    smallest_group = 1  # one rollout of each task


def rewards(batch):
    return batch.batch["token_level_scores"].float().sum(-1).tolist()


def test_one_result_more_than_tasks(llama_cpp_server, capsys):
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(QUICK)
        assert "Completed 5/4 tasks..." in capsys.readouterr().out
        with pytest.raises(AssertionError):
            seed.batch()
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(QUICK)
        batch, metrics = seed.batch()
        out = capsys.readouterr().out
        assert "Completed 4/4 tasks (0 failed)..." in out
        assert "5/4" not in out
        assert rewards(batch) == [1.0] * 4
        assert {name: metrics[f"ctxguard/{name}"] for name in ("queued", "kept", "failed", "stale")} == {
            "queued": 4, "kept": 4, "failed": 0, "stale": 1,
        }  # fmt: skip


def test_a_stale_result_in_the_place_of_one_that_is_not_there_yet(llama_cpp_server):
    second = [SHORT, SHORT, SHORT, task(think=8)]
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second)
        with pytest.raises(KeyError, match="rollout-"):
            seed.batch()
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second)
        batch, metrics = seed.batch()
        assert rewards(batch) == [1.0] * 4
        assert (metrics["ctxguard/kept"], metrics["ctxguard/stale"]) == (4, 1)


def test_validation_counts_a_result_that_is_not_its_own(llama_cpp_server):
    second = [task(reward=0.5), task(reward=0.5), task(reward=0.5), task(reward=1.0, think=8)]
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second, is_train=False)
        assert seed.daemon.get_test_metrics()["val/reward"] == 0.5  # in silence
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second, is_train=False)
        metrics = seed.daemon.get_test_metrics()
        assert metrics["val/reward"] == 0.625
        assert (metrics["ctxguard/val/kept"], metrics["ctxguard/val/stale"]) == (4, 1)


def test_every_rollout_fails(llama_cpp_server):
    second = [{**LONG, "tries": 1}] * 4
    with Seed(llama_cpp_server.base_url, AgentModeDaemon) as seed:
        seed.run(second)
        with pytest.raises(IndexError, match="argmax"):
            seed.batch()
    with Seed(llama_cpp_server.base_url, QuickDaemon) as seed:
        seed.leave_a_stale_result()
        seed.run(second)
        batch, metrics = seed.batch()
        assert rewards(batch) == [0.0] * 2  # placeholders: one mini-batch
        assert (metrics["ctxguard/failed/unmarked"], metrics["ctxguard/kept"]) == (4, 0)
        assert (metrics["ctxguard/placeholder_rows"], metrics["ctxguard/stale"]) == (2, 1)
