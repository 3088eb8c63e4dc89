"""Cutting a batch to whole mini-batches never leaves a rollout alone in its group."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.integrations.agentlightning_v1.flooring import Row, rows_to_keep


def rows(*groups: list[tuple[float, int]]) -> list[Row]:
    """Of each group its rollouts, as reward and number of rows."""
    return [
        Row(group, (group, number), reward)
        for group, rollouts in enumerate(groups)
        for number, (reward, count) in enumerate(rollouts)
        for _ in range(count)
    ]


def left(batch: list[Row], kept: list[int]) -> dict[Hashable, set[Hashable]]:
    groups: dict[Hashable, set[Hashable]] = defaultdict(set)
    for index in kept:
        groups[batch[index].group].add(batch[index].rollout)
    return groups


rollout = st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 3))
batches = st.lists(st.lists(rollout, min_size=2, max_size=4), max_size=6).map(lambda groups: rows(*groups))


@given(batches, st.integers(1, 9), st.none() | st.integers(1, 20), st.integers(0, 3))
def test_whole_mini_batches_and_no_lone_rollout(
    batch: list[Row], mini_batch: int, most: int | None, seed: int
) -> None:
    kept = rows_to_keep(batch, mini_batch=mini_batch, most=most, rng=random.Random(seed))
    assert kept == sorted(set(kept))
    assert set(kept) <= set(range(len(batch)))
    assert len(kept) % mini_batch == 0
    assert len(kept) <= (len(batch) if most is None else most)
    assert all(len(rollouts) >= 2 for rollouts in left(batch, kept).values())


@given(batches, st.sampled_from([2, 4, 8]), st.integers(0, 3))
def test_an_even_mini_batch_loses_less_than_one(batch: list[Row], mini_batch: int, seed: int) -> None:
    kept = rows_to_keep(batch, mini_batch=mini_batch, rng=random.Random(seed))
    assert len(batch) - len(kept) < mini_batch


@given(batches, st.integers(1, 9))
def test_without_groups_to_keep_whole_it_loses_less_than_one(batch: list[Row], mini_batch: int) -> None:
    kept = rows_to_keep(batch, mini_batch=mini_batch, smallest_group=1)
    assert len(batch) - len(kept) < mini_batch


def test_what_teaches_nothing_goes_first() -> None:
    batch = rows([(1.0, 1), (0.0, 1)], [(1.0, 1), (1.0, 1)], [(0.0, 1), (1.0, 1)])
    assert left(batch, rows_to_keep(batch, mini_batch=4)).keys() == {0, 2}


def test_a_rollout_of_several_rows_loses_one_before_a_group_loses_a_rollout() -> None:
    batch = rows([(1.0, 3), (0.0, 1), (0.0, 1)])
    kept = rows_to_keep(batch, mini_batch=4)
    assert len(left(batch, kept)[0]) == 3


@pytest.mark.parametrize("seed", range(5))
def test_pairs_stay_pairs_with_an_odd_mini_batch(seed: int) -> None:
    """Ten rows of five pairs in mini-batches of three: nine cannot be had, six can."""
    batch = rows(*[[(1.0, 1), (0.0, 1)]] * 5)
    assert len(rows_to_keep(batch, mini_batch=3, rng=random.Random(seed))) == 6


def test_less_than_a_mini_batch_is_none() -> None:
    assert rows_to_keep(rows([(1.0, 1), (0.0, 1)]), mini_batch=4) == []
    assert rows_to_keep([], mini_batch=4) == []
