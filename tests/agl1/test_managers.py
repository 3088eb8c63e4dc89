"""The rollout managers and the hooks, on the real server; the agents are played."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from agentlightning.hooks import load_hooks
from agentlightning.verl.agl_rollout_manager import AglRolloutManager

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.accounting import BatchAccount, Delivery
from ctxguard.integrations.agentlightning_v1 import Gateway
from ctxguard.integrations.agentlightning_v1 import hooks as hooks_module
from ctxguard.integrations.agentlightning_v1.failures import as_events, failure_of
from ctxguard.integrations.agentlightning_v1.manager import GuardedAsyncRolloutManager, GuardedRolloutManager
from ctxguard.integrations.agentlightning_v1.watch import RolloutWatch
from tests.agl1.players import Players
from tests.agl1.rig import KEY, Agl1, tasks

GOOD = {"calls": [[[1, 2], [3]]], "reward": 1.0}
FAILED = {"calls": [[[1, 2], [3]], [[1, 2, 3, 4], [5]]], "refused": True, "end": "failed"}
SWALLOWED = {"calls": [[[1, 2], [3]]], "refused": True}
HANGING = {"calls": [[[1, 2], [3]]], "end": "hang"}
UNSTARTED = {"end": "never"}


def failure(rollout: Any) -> Any:
    return failure_of(
        state=rollout.rollout_state,
        error_message=rollout.error_message,
        events=as_events(rollout.events),
        reward=rollout.final_reward,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Agl1(tmp_path_factory.mktemp("server"), runs_agents=False) as running, Players(running):
        yield running


# Waiting


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (HANGING, r"still running after \d+ s"),
        (UNSTARTED, r"queued, and no rollout started or ended for \d+ s"),
    ],
)
def test_a_rollout_that_never_ends_holds_the_batch_for_a_stated_time(
    server: Agl1, task: dict[str, Any], said: str
) -> None:
    unguarded = server.manager(AglRolloutManager, "")
    done: list[Any] = []
    batch = tasks(GOOD, task)
    waiting = threading.Thread(
        target=lambda: done.extend(unguarded.enqueue_and_wait_until_completed(batch, is_train=True)),
        daemon=True,
    )
    waiting.start()
    waiting.join(4)
    assert waiting.is_alive(), "1.0.2 itself waits for ever"

    guarded = server.manager(GuardedRolloutManager, "")
    guarded.watch = RolloutWatch(1.5)
    good, ended = sorted(
        guarded.enqueue_and_wait_until_completed(batch, is_train=True), key=lambda r: r.sample_idx_in_step
    )
    assert failure(good) is None
    mark = failure(ended)
    assert mark.reason == "not_returned"
    assert re.search(said, mark.detail), mark.detail

    open_ids = [r["rollout_id"] for r in server.get("/api/rollouts?state_in=queuing&state_in=running")]
    for rollout in open_ids:  # let the unguarded one go
        unguarded.client.patch(f"/api/rollouts/{rollout}", json={"status": {"state": "failed"}})
    waiting.join(10)
    assert len(done) == 2


def test_a_rollout_that_ends_while_it_is_given_up_is_taken_as_it_ended(server: Agl1) -> None:
    manager = server.manager(GuardedRolloutManager, "")
    manager.watch = RolloutWatch(0.0, clock=iter(range(1_000)).__next__)
    (rollout,) = manager._create_rollouts(tasks(UNSTARTED), is_train=True)
    path = f"/api/rollouts/{rollout.rollout_id}"
    get = manager.client.get

    def get_and_end(*args: Any, **kwargs: Any) -> Any:
        """Between the manager's look and its giving up, the rollout ends well."""
        answer = get(*args, **kwargs)
        for state in ("running", "succeeded"):
            manager.client.patch(path, json={"status": {"state": state}})
        return answer

    manager.client.get = get_and_end
    assert manager._get_rollout(rollout.rollout_id).status.state == "succeeded"


# Asynchronous training


def test_carried_over_rollouts_are_accounted_for_in_the_step_that_returns_them(
    server: Agl1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that hangs is carried over twice, the second time with one of its two rollouts finished."""
    monkeypatch.setenv("AGL_BASE_URL", server.url)
    monkeypatch.setenv("AGL_KEY", KEY)
    hooks = load_hooks(hooks_module.__file__)
    hooks.on_startup()
    watch = RolloutWatch(60)
    queued: dict[str, str] = {}
    returned: list[Any] = []
    carried: list[Any] = []

    def step(number: int, *batch: dict[str, Any]) -> Any:
        nonlocal carried
        manager = server.manager(GuardedAsyncRolloutManager, "", train_rollout_n=2, step=number, hooks=hooks)
        manager.watch = watch
        done, carried = manager.enqueue_and_wait_until_group_completed(
            tasks(*batch), carried, is_train=True, target_finished_group_num=2
        )
        queued.update(manager.queued)
        returned.extend(done)
        return manager.client

    client = step(1, GOOD, FAILED, HANGING)
    first, last = (rollout.rollout_id for rollout in carried)
    assert (hooks.succeeded, hooks.failed) == (2, {"context_overflow": 2})

    client.patch(f"/api/rollouts/{first}", json={"status": {"state": "failed"}})
    step(2, GOOD, GOOD)
    assert {rollout.rollout_id for rollout in carried} == {first, last}
    assert (hooks.succeeded, hooks.failed) == (6, {"context_overflow": 2, "unmarked": 1})

    client.patch(f"/api/rollouts/{last}", json={"status": {"state": "failed"}})
    step(3, GOOD)
    assert carried == []
    assert (hooks.succeeded, hooks.failed) == (8, {"context_overflow": 2, "unmarked": 2}), "each counts once"

    account = BatchAccount(queued)
    deliveries = {account.deliver(rollout.rollout_id, failure(rollout)) for rollout in returned}
    assert deliveries == {Delivery.TAKEN}
    assert account.missing == ()
    assert len(account.failures) == 4


# Hooks


def hooks_file(folder: Path, text: str) -> str:
    file = folder / "hooks_file.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


MODULE = "ctxguard.integrations.agentlightning_v1"


def test_the_loader_takes_a_file_with_one_import(tmp_path: Path) -> None:
    path = hooks_file(tmp_path, f"from {MODULE}.hooks import FailedRolloutHooks\n")
    assert type(load_hooks(path)).__name__ == "FailedRolloutHooks"


def test_the_loader_takes_a_subclass_where_only_it_is_visible(tmp_path: Path) -> None:
    text = f"from {MODULE} import hooks\nclass Mine(hooks.FailedRolloutHooks):\n    base_url = 'http://agl'\n"
    loaded = load_hooks(hooks_file(tmp_path, text))
    assert type(loaded).__name__ == "Mine"
    loaded.on_startup()


def test_the_loader_refuses_a_file_in_which_both_are_visible(tmp_path: Path) -> None:
    text = f"from {MODULE}.hooks import FailedRolloutHooks\nclass Mine(FailedRolloutHooks):\n    pass\n"
    with pytest.raises(ValueError, match="Multiple RolloutHooks subclasses"):
        load_hooks(hooks_file(tmp_path, text))


def test_hooks_without_the_servers_address_stop_the_run_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AGL_BASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="AGL_BASE_URL"):
        load_hooks(hooks_module.__file__).on_startup()


@pytest.mark.parametrize(
    ("task", "reason", "rows"), [(FAILED, "context_overflow", 2), (SWALLOWED, "swallowed_overflow", 1)]
)
def test_hooks_take_out_the_rows_of_a_failed_rollout(
    server: Agl1, tmp_path: Path, task: dict[str, Any], reason: str, rows: int
) -> None:
    text = f"""
from {MODULE} import hooks
class Mine(hooks.FailedRolloutHooks):
    base_url = {server.url!r}
    key = {KEY!r}
    max_prompt_length = 64
"""
    unguarded = server.manager(AglRolloutManager, "")
    done = unguarded.enqueue_and_wait_until_completed(tasks(GOOD, task), is_train=True)
    assert sorted(len(rollout.triplets) for rollout in done) == sorted([1, rows])

    hooks = load_hooks(hooks_file(tmp_path, text))
    manager = server.manager(AglRolloutManager, "", hooks=hooks)
    good, failed = sorted(
        manager.enqueue_and_wait_until_completed(tasks(GOOD, task), is_train=True),
        key=lambda rollout: rollout.sample_idx_in_step,
    )
    assert [triplet.prompt["token_ids"] for triplet in good.triplets] == [[1, 2]]
    (placeholder,) = failed.triplets
    assert len(placeholder.prompt["token_ids"]) == 65, "one more than the trainer takes"
    dropped = [event["data"] for event in failed.events if event["event_type"] == "ctxguard.dropped"]
    assert dropped == [{"reason": reason, "rows": rows}]
    assert (hooks.succeeded, hooks.failed) == (1, {reason: 1})


def test_hooks_tell_the_agents_their_budget(server: Agl1, tmp_path: Path) -> None:
    text = f"""
from ctxguard import ContextBudget
from {MODULE} import hooks
class Mine(hooks.FailedRolloutHooks):
    base_url = {server.url!r}
    budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
"""
    manager = server.manager(AglRolloutManager, "", hooks=load_hooks(hooks_file(tmp_path, text)))
    (rollout,) = manager._create_rollouts(tasks(UNSTARTED), is_train=True)
    told = Gateway("", f"{server.url}/api/rollouts/{rollout.rollout_id}/attempt/0/events", KEY).told()
    assert told.budget is not None
    assert (told.budget.window, told.budget.max_prompt_tokens) == (20480, 12288)
    manager.client.patch(f"/api/rollouts/{rollout.rollout_id}", json={"status": {"state": "failed"}})
