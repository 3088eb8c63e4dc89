"""When a rollout is given up."""

from __future__ import annotations

from ctxguard.integrations.agentlightning_v1.watch import RolloutWatch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_running_rollout_has_its_time_from_when_it_was_seen_to_run() -> None:
    clock = Clock()
    watch = RolloutWatch(10, clock)
    watch.enqueue(["a"])
    clock.now = 9
    assert watch.overdue("a", "running") is None
    clock.now = 19
    assert watch.overdue("a", "running") is None
    clock.now = 19.5
    assert watch.overdue("a", "running") == "still running after 10 s"


def test_a_queue_that_moves_is_in_order_however_long_it_is() -> None:
    clock = Clock()
    watch = RolloutWatch(10, clock)
    watch.enqueue(["a", "b", "c"])
    clock.now = 8
    assert watch.overdue("a", "running") is None
    clock.now = 17
    assert watch.overdue("b", "queuing") is None
    assert watch.overdue("a", "succeeded") is None
    clock.now = 26
    assert watch.overdue("b", "queuing") is None
    clock.now = 28
    assert watch.overdue("b", "queuing") == "queued, and no rollout started or ended for 11 s"


def test_one_that_ends_between_two_looks_moves_the_queue() -> None:
    clock = Clock()
    watch = RolloutWatch(10, clock)
    watch.enqueue(["quick", "waiting"])
    clock.now = 9
    assert watch.overdue("quick", "succeeded") is None
    clock.now = 18
    assert watch.overdue("waiting", "queuing") is None
    assert watch.overdue("quick", "succeeded") is None, "looked at again, it moves nothing"
    clock.now = 19.5
    assert watch.overdue("waiting", "queuing") is not None


def test_a_new_batch_starts_the_time_anew() -> None:
    clock = Clock()
    watch = RolloutWatch(10, clock)
    clock.now = 100
    watch.enqueue(["a"])
    assert watch.overdue("a", "queuing") is None
