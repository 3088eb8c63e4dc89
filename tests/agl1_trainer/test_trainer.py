"""`GuardedTrainer` beside Agent Lightning's own trainer: the same batches, the real server, verl's own advantages.

The agents are played, so that their rewards and token ids are known. Batches are made so that the rows are whole
mini-batches (of four), where a test is not about the cutting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agentlightning.hooks import load_hooks

from ctxguard.errors import ConfigurationError, FailedRolloutsError
from ctxguard.integrations.agentlightning_v1.trainer import GuardedTrainer
from ctxguard.integrations.marks import FailureMark
from tests.agl1.rig import KEY, Agl1
from tests.agl1_trainer.bench import Guarded, Unguarded, advantages, config_for, fates

TURNS = [[[1, 2], [3]], [[1, 2, 3, 4], [5]], [[1, 2, 3, 4, 5, 6], [7]]]
MARK = FailureMark("context_overflow", "61709 tokens", {"prompt_tokens": 61709, "limit": 20480}).to_dict()
PER_ROW = {"algorithm.enable_rollout_level_advantage": False}
ZERO_ROWS = "get_train_data_batch emitted zero training rows"


def good(reward: float, turns: int = 1) -> dict[str, Any]:
    return {"calls": TURNS[:turns], "reward": reward}


def failed(turns: int = 0, mark: Any = MARK) -> dict[str, Any]:
    """A guarded agent's failure after some good turns; without a mark, an unguarded agent's."""
    return {"calls": TURNS[:turns], "refused": True, "end": "failed", "mark": mark}


SWALLOWED = {"calls": TURNS, "refused": True}
"""An unguarded agent that takes no notice of a refusal: it exits with status 0 and no reward."""


def step(kind: type[Any], server: Agl1, *tasks: dict[str, Any], **changes: Any) -> tuple[list[Any], Any]:
    """What one step trains on (see `advantages`), and its metrics."""
    trainer = kind(config_for(server, **changes), [tasks])
    metrics = trainer.step()
    return (advantages(trainer.trained[0]) if trainer.trained else []), metrics


def near(rows: list[tuple[float, list[float]]]) -> list[Any]:
    """Advantages to compare with: 1.0.2 has its scores in bfloat16, whose numbers have three digits."""
    return [(reward, pytest.approx(values, abs=0.01)) for reward, values in rows]


def counts(metrics: dict[str, Any]) -> dict[str, Any]:
    """Our own counts that are not 0."""
    names = ("queued", "kept", "failed", "small", "trained", "rows", "stale", "duplicate")
    ours = {name.removeprefix("ctxguard/"): value for name, value in metrics.items() if "ctxguard/" in name}
    return {name: value for name, value in ours.items() if value and name.startswith(names)}


# The advantages of a batch with failures, each beside what the unguarded trainer makes of it


def test_failed_rollouts_do_not_count_in_the_advantages_of_their_group(server: Agl1) -> None:
    batch = [fates(good(1), good(0), failed(1), failed(1)) for _ in range(2)]
    rows, metrics = step(Unguarded, server, *batch)
    assert rows == near([(0.0, [-0.5])] * 6 + [(1.0, [1.5])] * 2), "as the failed ones are taken for zeros"
    assert metrics["training/reward"] == 0.25

    rows, metrics = step(Guarded, server, *batch)
    assert rows == near([(0.0, [-0.707])] * 2 + [(1.0, [0.707])] * 2), "those of (1, 0) alone"
    assert metrics["training/reward"] == 0.5
    assert counts(metrics) == {
        "queued": 8,
        "kept": 4,
        "failed": 4,
        "failed/context_overflow": 4,
        "trained_rollouts": 4,
        "rows": 4,
        "rows_per_rollout": 1.0,
    }
    assert metrics["ctxguard/excluded_share"] == 0.5


def test_a_lone_survivor_makes_no_row(server: Agl1) -> None:
    batch = [fates(good(1), failed(), failed(), failed()) for _ in range(4)]
    rows, _ = step(Unguarded, server, *batch)
    assert rows == near([(1.0, [1.0])] * 4), "its raw reward as advantage"
    rows, metrics = step(Guarded, server, *batch)
    assert (rows, metrics) == ([], None), "nothing is left: the step is skipped"


def test_a_rollout_that_failed_after_good_turns_makes_no_row(server: Agl1) -> None:
    batch = [fates(good(1), good(1), good(1), failed(3)) for _ in range(4)]
    rows, _ = step(Unguarded, server, *batch)
    assert rows == near([(0.0, [-1.5] * 3)] * 4 + [(1.0, [0.5])] * 12)
    rows, _ = step(Unguarded, server, *batch, **PER_ROW)
    assert rows == near([(0.0, [-0.913] * 3)] * 4 + [(1.0, [0.913])] * 12)

    rows, metrics = step(Guarded, server, *batch)
    assert rows == near([(1.0, [0.0])] * 12)
    assert counts(metrics)["failed"] == 4


def test_a_rollout_of_three_rows_weighs_as_one(server: Agl1) -> None:
    batch = [fates(good(1, turns=3), good(1), good(0), good(0)) for _ in range(2)]
    rows, _ = step(Unguarded, server, *batch, **PER_ROW)
    assert rows == near([(0.0, [-1.291])] * 4 + [(1.0, [0.645])] * 2 + [(1.0, [0.645] * 3)] * 2)
    rows, metrics = step(Guarded, server, *batch)
    assert rows == near([(0.0, [-0.866])] * 4 + [(1.0, [0.866])] * 2 + [(1.0, [0.866] * 3)] * 2)
    unsplit, _ = step(Guarded, server, *[fates(good(1), good(1), good(0), good(0))] * 1)
    assert unsplit == near([(0.0, [-0.866])] * 2 + [(1.0, [0.866])] * 2)
    assert metrics["ctxguard/rows_per_rollout"] == 1.5


# The report's batches


def test_a_failed_rollouts_good_turns_are_not_trained_on_as_reward_zero(server: Agl1) -> None:
    batch = [fates(good(1), good(1), *[failed(3, mark=None)] * 2)]
    rows, metrics = step(Unguarded, server, *batch)
    assert rows == near([(0.0, [-0.866] * 3)] * 2 + [(1.0, [0.866])] * 2)
    assert metrics["training/n_sample"] == 8, "6 of them of failed rollouts"

    rows, metrics = step(Guarded, server, *batch, *batch)
    assert rows == near([(1.0, [0.0])] * 4)
    assert counts(metrics)["failed/context_overflow"] == 4, "the agents did not say, but the server refused"


def test_a_swallowed_refusal_is_no_success(server: Agl1) -> None:
    batch = [fates(good(1), good(1), SWALLOWED, SWALLOWED)]
    rows, _ = step(Unguarded, server, *batch)
    assert rows == near([(0.0, [-0.866] * 3)] * 2 + [(1.0, [0.866])] * 2)
    rows, metrics = step(Guarded, server, *batch, *batch)
    assert rows == near([(1.0, [0.0])] * 4)
    assert counts(metrics)["failed/swallowed_overflow"] == 4


def test_a_batch_of_failures_skips_its_step_and_the_run_goes_on(
    server: Agl1, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Both trainers' own ``fit``: a batch of failures, then a good one."""
    batches = [[fates(failed())], [fates(good(1), good(0), good(1), good(0))]]
    with pytest.raises(RuntimeError, match=ZERO_ROWS):
        Unguarded(config_for(server), batches).fit()

    trainer = Guarded(config_for(server, **{"trainer.total_epochs": 2}), batches)
    with caplog.at_level(logging.WARNING, "ctxguard"):
        trainer.fit()
    assert [len(batch) for batch in trainer.trained] == [4]
    assert "step 1 skipped: 0 rows to train on, 4 needed; {'ctxguard/failed': 4" in caplog.text
    logged = capsys.readouterr().out
    assert "ctxguard/skipped_steps:1" in logged, "in the metrics of the step after it"
    assert "ctxguard/queued:4" in logged


def test_validation_reports_the_survivors_and_the_failures(server: Agl1) -> None:
    tasks = [good(1), good(0.5), failed(1), failed()]
    changes = {"agentlightning.reward_fillna_value": -1.0}
    metrics = Unguarded(config_for(server, **changes), [], [tasks])._validate()
    assert metrics["val/reward"] == (1 + 0.5 - 1 - 1) / 4

    metrics = Guarded(config_for(server, **changes), [], [tasks])._validate()
    assert metrics["val/reward"] == 0.75
    assert metrics["ctxguard/val/reward_with_failures_filled"] == (1 + 0.5 - 1 - 1) / 4
    assert (metrics["ctxguard/val/queued"], metrics["ctxguard/val/kept"]) == (4, 2)
    assert metrics["ctxguard/val/failed/context_overflow"] == 2


def test_validation_of_nothing_but_failures_does_not_stop_the_run(server: Agl1) -> None:
    tasks = [failed(), failed()]
    with pytest.raises(RuntimeError, match="get_test_metrics received zero completed rollouts with trace"):
        Unguarded(config_for(server), [], [tasks])._validate()
    metrics = Guarded(config_for(server), [], [tasks])._validate()
    assert metrics["val/reward"] == metrics["ctxguard/val/reward_with_failures_filled"] == 0.0
    assert metrics["ctxguard/val/failed"] == 2


# How failures are handled


@pytest.mark.parametrize(
    ("handling", "rows"),
    [
        ("exclude", [(0.0, [-0.707])] * 4 + [(1.0, [0.707])] * 4),
        ("zero", [(0.0, [-0.577])] * 8 + [(1.0, [1.155])] * 4),
        ("penalize(-1)", [(-1.0, [-1.0])] * 4 + [(0.0, [0.0])] * 4 + [(1.0, [1.0])] * 4),
    ],
)
def test_failed_rollouts_with_rows_are_trained_on_only_when_asked(
    server: Agl1, handling: str, rows: list[Any]
) -> None:
    """One failure of each task had a good turn before it failed, the other one has no row to train on."""
    batch = [fates(good(1), good(0), failed(1), failed()) for _ in range(4)]
    trained, _ = step(Guarded, server, *batch, **{"ctxguard.failure_handling": handling})
    assert trained == near(rows)


def test_failures_stop_the_run_when_asked(server: Agl1) -> None:
    batch = fates(good(1), good(0), failed(1), good(1))
    with pytest.raises(FailedRolloutsError, match=r"1 of 4 rollouts failed \(context_overflow: 1\)"):
        step(Guarded, server, batch, **{"ctxguard.failure_handling": "raise"})


def test_a_wrong_setting_is_said(server: Agl1) -> None:
    with pytest.raises(ConfigurationError, match=r"ctxguard\.failure_handling='ignore'.*penalize"):
        Guarded(config_for(server, **{"ctxguard.failure_handling": "ignore"}), [])
    with pytest.raises(ConfigurationError, match=r"ctxguard\.failures='zero'.*failure_handling"):
        Guarded(config_for(server, **{"ctxguard.failures": "zero"}), [])


# What else leaves a group with one rollout


def test_rows_that_are_too_long_do_not_leave_a_lone_rollout(server: Agl1) -> None:
    """The trainer throws such rows away before it computes advantages."""
    long = {"calls": [[list(range(1, 66)), [3]]], "reward": 0.0}
    batch = [fates(good(1), long, long, long) for _ in range(4)]
    rows, _ = step(Unguarded, server, *batch)
    assert rows == near([(1.0, [1.0])] * 4)
    rows, metrics = step(Guarded, server, *batch, fates(good(1), good(0), good(1), good(0)))
    assert rows == near([(0.0, [-0.866])] * 2 + [(1.0, [0.866])] * 2)
    assert (metrics["ctxguard/rows_too_long"], metrics["ctxguard/small_groups"]) == (12, 4)


def test_cutting_to_whole_mini_batches_does_not_leave_a_lone_rollout(server: Agl1) -> None:
    """Five rows, mini-batches of four: the one that goes is of the trio, never of the pair."""
    batch = [fates(good(1), good(0), good(1), failed()), fates(good(1), good(0), failed(), failed())]
    for _ in range(3):
        rows, metrics = step(Guarded, server, *batch)
        assert metrics["ctxguard/rows_cut_off"] == 1
        assert len(rows) == 4
        assert all(abs(advantage) in (0.707, 0.0) for _, [advantage] in rows), rows


def test_the_same_result_twice_and_late_counts_once(server: Agl1) -> None:
    batch = fates({**good(1), "twice": True}, good(0), good(1), {**good(0), "twice": True})
    _, metrics = step(Guarded, server, batch)
    assert counts(metrics) == {
        "queued": 4,
        "kept": 4,
        "trained_rollouts": 4,
        "rows": 4,
        "rows_per_rollout": 1.0,
    }


def test_a_rollout_that_never_returns_ends_as_failed(server: Agl1) -> None:
    hanging = {"calls": TURNS[:1], "end": "hang"}
    batch = [fates(good(1), good(0), hanging, {"end": "never"}) for _ in range(2)]
    rows, metrics = step(Guarded, server, *batch, **{"ctxguard.wait_seconds": 2})
    assert rows == near([(0.0, [-0.707])] * 2 + [(1.0, [0.707])] * 2)
    assert counts(metrics)["failed/not_returned"] == 4
    assert metrics["ctxguard/waited"] > 2


def test_a_rollout_without_token_ids_has_nothing_to_train_on(server: Agl1) -> None:
    bare = {"calls": [[[], [3]]], "reward": 1.0}
    batch = [fates(good(1), good(0), bare, good(1)) for _ in range(4)]
    _, metrics = step(Guarded, server, *batch)
    assert counts(metrics)["failed/no_rows"] == 4


def test_a_high_share_left_out_is_warned_of(server: Agl1, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ctxguard"):
        step(Guarded, server, *[fates(good(1), good(0), good(1), failed()) for _ in range(4)])
    assert (
        "25 % of the batch's 16 rollouts are not trained on (4 failed, 0 in groups too small)" in caplog.text
    )


# Asynchronous training


def test_asynchronous_steps_account_for_each_rollout_once(server: Agl1) -> None:
    """One group a step of two that run: a slow one is carried over, and its failure counts where it returns."""
    slow = fates(good(1), good(0, turns=2), {**failed(1), "end": "hang"}, good(1))
    changes = {
        "agentlightning.async_rollout.enabled": True,
        "agentlightning.async_rollout.async_train_batch_size": 2,
        "ctxguard.wait_seconds": 3,
    }
    quick = [[fates(good(1), good(0), good(1), good(0))] for _ in range(10)]
    trainer = Guarded(config_for(server, **changes), [[slow], *quick])
    steps: list[dict[str, Any]] = []
    while not steps or not steps[-1]["ctxguard/failed"]:
        steps.append(trainer.step())
        assert set(trainer._open_rollouts) == {rollout.rollout_id for rollout in trainer._carry_over_rollouts}
        assert len(steps) < 10
    assert len(steps) > 2
    assert steps[0]["ctxguard/carried_over"] == 4
    for metrics in steps:
        assert metrics["ctxguard/kept"] + metrics["ctxguard/failed"] == metrics["ctxguard/queued"] == 4
        assert metrics["ctxguard/stale"] == metrics["ctxguard/duplicate"] == 0
    assert counts(steps[-1])["failed/context_overflow"] == 1, "it was given up, but had said why it failed"


# Hooks with the unchanged trainer


def hooked(
    server: Agl1, folder: Path, batches: Sequence[Any], val: Sequence[Any] = (), **attributes: Any
) -> Any:
    lines = [f"    {name} = {value!r}" for name, value in attributes.items()]
    file = folder / "hooks.py"
    text = (
        "from ctxguard.integrations.agentlightning_v1 import hooks\nclass Mine(hooks.FailedRolloutHooks):\n"
    )
    file.write_text("\n".join([text, f"    base_url = {server.url!r}", f"    key = {KEY!r}", *lines]))
    trainer = Unguarded(config_for(server, **{"agentlightning.hooks": str(file)}), batches, val)
    assert type(load_hooks(str(file))).__name__ == "Mine"
    return trainer


@pytest.mark.parametrize(
    "fate", [failed(3, mark=None), failed(3), SWALLOWED], ids=["plain", "marked", "swallowed"]
)
def test_hooks_keep_failed_rollouts_out_of_the_rows(server: Agl1, tmp_path: Path, fate: Any) -> None:
    batch = [fates(good(1), good(0), fate, fate) for _ in range(2)]
    trainer = hooked(server, tmp_path, [batch])
    trainer.step()
    assert advantages(trainer.trained[0]) == near([(0.0, [-0.707])] * 2 + [(1.0, [0.707])] * 2)
    assert (trainer._hooks.succeeded, sum(trainer._hooks.failed.values())) == (4, 4)


def test_hooks_skip_a_batch_of_failures_where_they_know_the_longest_prompt(
    server: Agl1, tmp_path: Path
) -> None:
    batches = [
        [fates(failed(2))],
        [fates(good(1), good(0), failed(2), failed()), fates(good(1), good(0), *[failed()] * 2)],
    ]
    with pytest.raises(RuntimeError, match=ZERO_ROWS):
        hooked(server, tmp_path, batches).step()
    trainer = hooked(server, tmp_path, batches, [[failed(), failed()]], max_prompt_length=64)
    assert trainer.step() is None
    metrics = trainer.step()
    assert advantages(trainer.trained[0]) == near([(0.0, [-0.707])] * 2 + [(1.0, [0.707])] * 2)
    assert metrics["training/n_sample_dropped/marked"] == 4, "one row, too long, for each that failed"
    assert "rollout_log_probs" in trainer.trained[0].batch, (
        "which a row without log-probs would have cost the batch"
    )
    assert trainer._validate()["val/reward"] == 0.0


def test_hooks_keep_a_lone_survivor(server: Agl1, tmp_path: Path) -> None:
    """That, and the averages below, need our trainer."""
    trainer = hooked(server, tmp_path, [[fates(good(1), *[failed()] * 3) for _ in range(4)]])
    trainer.step()
    assert advantages(trainer.trained[0]) == near([(1.0, [1.0])] * 4)


def test_agent_lightning_itself_skips_a_step_with_too_few_rows(server: Agl1, tmp_path: Path) -> None:
    trainer = hooked(server, tmp_path, [[fates(good(1), good(0), failed(), failed())]])
    assert trainer.step() is None, "two rows, mini-batches of four"
    assert trainer.trained == []


def test_hooks_leave_the_failed_in_the_averages(server: Agl1, tmp_path: Path) -> None:
    trainer = hooked(server, tmp_path, [], [[good(1), good(0.5), failed(1), failed()]])
    assert trainer._validate()["val/reward"] == (1 + 0.5) / 4


def test_the_trainer_runs_the_users_hooks_too(server: Agl1, tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text(
        "from agentlightning.hooks import RolloutHooks\n"
        "class Mine(RolloutHooks):\n"
        "    seen = []\n"
        "    def on_enqueue(self, request):\n"
        "        return request.model_copy(update={'metadata': {'mine': 1}})\n"
        "    def on_failed(self, rollout, store):\n"
        "        self.seen.append(dict(rollout.metadata))\n"
    )
    trainer = Guarded(
        config_for(server, **{"agentlightning.hooks": str(file)}),
        [[fates(good(1), good(0), failed(), failed())]],
    )
    trainer.step()
    assert len(trainer._hooks.seen) == 2
    assert all(metadata["mine"] == 1 for metadata in trainer._hooks.seen)
    told = trainer._hooks.seen[0]["ctxguard"]
    assert told["budget"]["max_prompt_tokens"] == 64
    assert (told["servers"], told["model"]) == (["http://127.0.0.1:9/v1"], server.model)


def test_the_trainer_is_a_subclass_and_nothing_is_patched() -> None:
    from agentlightning.verl import trainer as theirs

    assert issubclass(GuardedTrainer, theirs.AgentLightningRayPPOTrainer)
    assert theirs.RolloutAdapter.__module__ == "agentlightning.verl.rollout_adapter"
    assert theirs.AglRolloutManager.__module__ == "agentlightning.verl.agl_rollout_manager"
