"""What a batch with failed rollouts trains on: the real 0.3.0 daemon and verl's real GRPO, unguarded and guarded."""

from __future__ import annotations

import logging
import pickle

import pytest
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard.errors import ConfigurationError, FailedRolloutsError
from ctxguard.integrations.agentlightning.filter import PLACEHOLDER_GROUP, GroupOfRollout
from ctxguard.integrations.agentlightning.steps import StepSkipped
from ctxguard.integrations.agentlightning.verl import PER_ROLLOUT, GuardedDaemon, GuardedTrainer
from ctxguard.testing.child_process import free_port
from tests.agl.batches import FAILED, Result, advantages, batch_of, daemon_with, overflow, same

GOOD, BAD, UNMARKED = Result(1.0), Result(0.0), Result(FAILED, 0)
HALF = round(0.5 / 2**-0.5, 3)
"""0.707: (1 - 0.5) / std of (1, 0)."""


def subclass(**settings):
    return type("Daemon", (GuardedDaemon,), settings)


class TestAdvantages:
    """The table of the issue, each case beside its unguarded value."""

    def test_two_failed_of_four_leave_the_advantages_of_the_other_two(self):
        tasks = [[GOOD, BAD, overflow(turns=2), overflow()]]
        unguarded = advantages(batch_of(daemon_with(AgentModeDaemon, tasks))[0])
        assert unguarded == {"t0r0": [1.5], "t0r1": [-0.5], "t0r2": [-0.5, -0.5]}
        guarded = advantages(batch_of(daemon_with(GuardedDaemon, tasks))[0])
        assert guarded == {"t0r0": [HALF], "t0r1": [-HALF]}
        assert guarded == advantages(batch_of(daemon_with(AgentModeDaemon, [[GOOD, BAD]]))[0])

    def test_three_failed_of_four_leave_no_row_of_the_group(self):
        tasks = [[GOOD, overflow(), overflow(), UNMARKED], [GOOD, BAD]]
        unguarded = advantages(batch_of(daemon_with(AgentModeDaemon, tasks))[0])
        assert unguarded["t0r0"] == [1.0]  # the raw reward
        guarded = advantages(batch_of(daemon_with(GuardedDaemon, tasks))[0])
        assert guarded == {"t1r0": [HALF], "t1r1": [-HALF]}

    def test_good_turns_of_a_failed_rollout_are_not_trained_on(self):
        tasks = [[GOOD, GOOD, GOOD, overflow(turns=3)]]
        unguarded = advantages(batch_of(daemon_with(AgentModeDaemon, tasks))[0])
        assert unguarded == {"t0r0": [0.913], "t0r1": [0.913], "t0r2": [0.913], "t0r3": [-0.913] * 3}
        guarded = advantages(batch_of(daemon_with(GuardedDaemon, tasks))[0])
        assert guarded == {"t0r0": [0.0], "t0r1": [0.0], "t0r2": [0.0]}

    def test_a_rollout_of_three_rows_counts_once_per_rollout(self):
        whole = advantages(batch_of(daemon_with(AgentModeDaemon, [[GOOD, GOOD, BAD, BAD]]))[0])
        assert whole == {"t0r0": [0.866], "t0r1": [0.866], "t0r2": [-0.866], "t0r3": [-0.866]}
        split = [[Result(1.0, turns=3), GOOD, BAD, BAD]]
        per_row = advantages(batch_of(daemon_with(AgentModeDaemon, split))[0])
        assert per_row == {"t0r0": [0.645] * 3, "t0r1": [0.645], "t0r2": [-1.291], "t0r3": [-1.291]}
        batch, metrics = batch_of(daemon_with(GuardedDaemon, split))
        assert metrics["ctxguard/rows_per_rollout"] == 6 / 4
        assert advantages(batch, PER_ROLLOUT) == {**whole, "t0r0": [0.866] * 3}

    def test_per_rollout_equals_verls_own_where_each_has_one_row(self):
        tasks = [[Result(0.25), Result(0.5), Result(1.0)], [Result(-1.0), Result(0.125)]]
        expected = advantages(batch_of(daemon_with(AgentModeDaemon, tasks))[0])
        assert advantages(batch_of(daemon_with(GuardedDaemon, tasks))[0], PER_ROLLOUT) == expected

    def test_per_rollout_without_the_filter_says_what_is_missing(self):
        batch, _ = batch_of(daemon_with(AgentModeDaemon, [[GOOD, BAD]]))
        with pytest.raises(ConfigurationError, match="needs daemon_cls=GuardedDaemon"):
            advantages(batch, PER_ROLLOUT)

    def test_the_groups_survive_what_a_batch_goes_through(self):
        batch, _ = batch_of(daemon_with(GuardedDaemon, [[GOOD, BAD]]))
        group = pickle.loads(pickle.dumps(batch))[[1, 0]].non_tensor_batch["data_id_list"][0]
        assert (group, group.rollout_id, type(group)) == ("t0", "t0r1", GroupOfRollout)


class TestHandling:
    TASKS = [[GOOD, BAD, overflow(turns=2), overflow()]]

    def test_zero_trains_on_the_rows_there_are(self):
        batch, metrics = batch_of(daemon_with(subclass(failure_handling="zero"), self.TASKS))
        assert advantages(batch) == {"t0r0": [1.5], "t0r1": [-0.5], "t0r2": [-0.5, -0.5]}
        assert (metrics["ctxguard/failed"], metrics["ctxguard/trained_rollouts"]) == (2, 3)

    def test_penalize_sets_the_reward(self):
        batch, _ = batch_of(daemon_with(subclass(failure_handling="penalize(-2)"), self.TASKS))
        rewards = batch.batch["token_level_scores"].float().sum(-1).tolist()
        assert dict(zip(batch.non_tensor_batch["rollout_id_list"], rewards, strict=True)) == {
            "t0r0": 1.0, "t0r1": 0.0, "t0r2": -2.0,
        }  # fmt: skip

    def test_raise_stops_the_run_and_says_why(self):
        with pytest.raises(
            FailedRolloutsError, match=r"2 of 4 rollouts failed \(context_overflow: 2\)"
        ) as caught:
            batch_of(daemon_with(subclass(failure_handling="raise"), self.TASKS))
        assert (caught.value.failed, caught.value.queued) == (2, 4)

    def test_raise_is_quiet_where_nothing_failed(self):
        batch, _ = batch_of(daemon_with(subclass(failure_handling="raise"), [[GOOD, BAD]]))
        assert len(batch) == 2

    def test_an_unknown_handling_is_refused_at_the_start(self):
        with pytest.raises(ConfigurationError, match="failure handling 'ignore' is unknown"):
            subclass(failure_handling="ignore")(free_port())


class TestMetrics:
    def test_every_queued_rollout_is_in_one_place(self, caplog):
        no_rows, not_a_number = Result(0.5, turns=0), Result(float("nan"))
        tasks = [[GOOD, BAD, overflow(), UNMARKED], [GOOD, no_rows, not_a_number, Result(FAILED)]]
        daemon = daemon_with(GuardedDaemon, tasks)
        daemon._take(overflow().rollout("of-another-batch"), None)
        daemon._take(GOOD.rollout("t0r0"), None)
        with caplog.at_level(logging.WARNING, "ctxguard"):
            _, metrics = batch_of(daemon)
        ours = {
            name.removeprefix("ctxguard/"): same(v)
            for name, v in metrics.items()
            if name.startswith("ctxguard/")
        }
        assert ours == {
            "queued": 8, "kept": 3, "failed": 5,
            "failed/context_overflow": 1, "failed/unmarked": 1,
            "failed/no_rows": 1, "failed/invalid_reward": 1, "failed/no_reward": 1,
            "stale": 1, "duplicate": 1, "small_groups": 1, "small_group_rollouts": 1,
            "trained_rollouts": 2, "excluded_share": 0.75, "waited": 0.0,
            "rows": 2, "rows_too_long": 0, "rows_per_rollout": 1.0, "placeholder_rows": 0,
        }  # fmt: skip
        assert (
            "75 % of the batch's 8 rollouts are not trained on (5 failed, 1 in groups too small)"
            in caplog.text
        )

    def test_the_base_classs_reward_is_over_the_survivors(self):
        tasks = [[GOOD, BAD, overflow(turns=2), overflow()]]
        _, unguarded = batch_of(daemon_with(AgentModeDaemon, tasks))
        _, guarded = batch_of(daemon_with(GuardedDaemon, tasks))
        assert (same(unguarded["training/reward"]), same(guarded["training/reward"])) == (0.25, 0.5)
        assert (unguarded["training/n_rollouts"], guarded["training/n_rollouts"]) == (4, 2)

    def test_the_bookkeeping_is_as_before_when_the_batch_is_made(self):
        daemon = daemon_with(GuardedDaemon, [[GOOD, BAD, overflow()]])
        batch_of(daemon)
        assert sorted(daemon._completed_rollouts_v0) == ["t0r0", "t0r1", "t0r2"]
        assert sorted(daemon._task_id_to_original_sample) == ["t0r0", "t0r1", "t0r2"]
        assert daemon._total_tasks_queued == 3


class TestNothingToTrainOn:
    TASKS = [[overflow()] * 4]

    def test_unguarded_the_run_ends(self):
        with pytest.raises(IndexError, match="argmax"):
            batch_of(daemon_with(AgentModeDaemon, self.TASKS))

    @pytest.mark.parametrize("level", ["transition", "trajectory"])
    def test_with_the_daemon_alone_empty_rows_stand_in(self, level):
        daemon = daemon_with(GuardedDaemon, self.TASKS, mini_batch_size=3, trace_aggregator={"level": level})
        batch, metrics = batch_of(daemon)
        assert set(batch.non_tensor_batch["data_id_list"]) == {PLACEHOLDER_GROUP}
        assert (len(batch), metrics["ctxguard/placeholder_rows"], metrics["ctxguard/rows"]) == (3, 3, 0)
        assert batch.batch["token_level_scores"].abs().sum() == 0
        assert all(row == [0.0] for row in advantages(batch).values())

    def test_less_than_a_mini_batch_is_filled_up(self):
        batch, metrics = batch_of(daemon_with(GuardedDaemon, [[GOOD, BAD]], mini_batch_size=5))
        rows = advantages(batch)
        assert (rows.pop("t0r0"), rows.pop("t0r1"), len(rows)) == ([HALF], [-HALF], 3)
        assert metrics["ctxguard/placeholder_rows"] == 3

    def test_with_the_trainer_the_step_is_skipped(self):
        daemon = daemon_with(GuardedDaemon, [[GOOD, BAD, overflow()]])
        daemon.rows_needed = 3
        with pytest.raises(StepSkipped) as caught:
            batch_of(daemon)
        metrics = caught.value.args[0]
        assert (metrics["ctxguard/rows"], metrics["ctxguard/skipped_step"], metrics["ctxguard/failed"]) == (
            2,
            1,
            1,
        )

    def test_rows_over_the_prompt_limit_are_no_rows_worth_a_step(self):
        daemon = daemon_with(GuardedDaemon, [[GOOD, BAD]])
        daemon.rows_needed = 2
        with pytest.raises(StepSkipped):
            batch_of(daemon, prompt=2)


class TestTrainer:
    """`GuardedTrainer` with the parts of the real one that a step needs before it has a batch."""

    class Workers:
        world_size = 4

        def __init__(self):
            self.asleep = True

        def wake_up(self):
            self.asleep = False

        def sleep(self):
            self.asleep = True

        server_addresses = ["127.0.0.1:1"]

    def trainer(self, daemon):
        from omegaconf import OmegaConf

        trainer = object.__new__(GuardedTrainer)
        trainer.config = OmegaConf.create(
            {
                "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}},
                "agentlightning": {"trace_aggregator": {"level": "transition"}},
                "data": {"max_prompt_length": 8, "max_response_length": 8},
            }
        )
        trainer.agent_mode_daemon = daemon
        trainer.actor_rollout_wg = trainer.async_rollout_manager = self.Workers()
        trainer.global_steps = 1
        return trainer

    def test_a_thin_step_is_skipped_and_cleaned_up(self, monkeypatch):
        import torch

        daemon = daemon_with(GuardedDaemon, [[GOOD, BAD, overflow()]])
        monkeypatch.setattr(daemon, "set_up_data_and_server", lambda *args: None)  # its batch has run
        monkeypatch.setattr(daemon, "run_until_all_finished", lambda: None)
        trainer = self.trainer(daemon)
        metrics = trainer._train_step({"fake_ids": torch.ones(1, 1)})
        assert (metrics["ctxguard/skipped_step"], metrics["ctxguard/rows"]) == (1, 2)  # of 4 workers
        assert trainer.async_rollout_manager.asleep
        assert daemon._total_tasks_queued == 0


class TestValidation:
    def daemon(self, kind, *tasks):
        return daemon_with(kind, tasks, is_train=False, train_rollout_n=1)

    def test_reward_over_survivors_and_with_failures_filled(self):
        tasks = [[Result(0.5)], [Result(1.0)], [overflow(turns=1)], [UNMARKED]]
        unguarded = self.daemon(AgentModeDaemon, *tasks).get_test_metrics()
        guarded = self.daemon(GuardedDaemon, *tasks).get_test_metrics()
        assert (same(unguarded["val/reward"]), same(guarded["val/reward"])) == (0.375, 0.75)
        assert guarded["ctxguard/val/reward_with_failures_filled"] == 0.375
        assert (guarded["ctxguard/val/kept"], guarded["ctxguard/val/failed"]) == (2, 2)
        assert (guarded["val/n_rollouts"], guarded["val/turn_count"]) == (2, 1.0)

    def test_all_failed_has_no_nan(self):
        metrics = self.daemon(GuardedDaemon, [overflow()], [UNMARKED]).get_test_metrics()
        assert (metrics["val/reward"], metrics["ctxguard/val/failed"]) == (0.0, 2)
        assert all(value == value for value in metrics.values())

    def test_a_reward_without_turns_counts(self):
        metrics = self.daemon(GuardedDaemon, [Result(1.0, turns=0)], [overflow()]).get_test_metrics()
        assert (metrics["val/reward"], metrics["ctxguard/val/kept"]) == (1.0, 1)
