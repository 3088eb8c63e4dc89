"""Which turns of a rollout share a row."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ctxguard.integrations.trajectories import extends, split_into_segments

ids = st.lists(st.integers(0, 2), max_size=6)  # few values: repetitions are the interesting case
turns = st.lists(st.tuples(ids, ids), max_size=8)


def test_a_turn_that_goes_on_joins_the_row_and_another_starts_one() -> None:
    assert split_into_segments([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 9], [6])]) == [[0, 1], [2]]


def test_a_rollout_without_turns_has_no_row() -> None:
    assert split_into_segments([]) == []


def test_the_same_prompt_again_starts_a_row() -> None:
    assert split_into_segments([([1, 2], []), ([1, 2], [3])]) == [[0], [1]]


def test_a_prompt_that_ends_where_the_previous_call_ended_starts_a_row() -> None:
    assert split_into_segments([([1, 2], [3]), ([1, 2, 3], [4])]) == [[0], [1]]


def test_an_answer_that_repeats_what_the_prompt_left_out_starts_a_row() -> None:
    """Agent Lightning 0.3.0 merges these two: prompt and answer together start with the first call."""
    first, second = ([1, 2], [3, 4]), ([1, 2], [3, 4, 5])
    assert [*second[0], *second[1]][:4] == [*first[0], *first[1]]
    assert split_into_segments([first, second]) == [[0], [1]]


def test_a_turn_is_compared_with_the_call_before_it_not_with_its_row() -> None:
    one, other = ([1], [2]), ([7], [8])
    assert split_into_segments([one, other, ([1, 2, 3], [4])]) == [[0], [1], [2]]


def test_nothing_extends_a_call_without_ids() -> None:
    assert not extends([1, 2], [])
    assert split_into_segments([([], []), ([1], [2])]) == [[0], [1]]


@given(turns)
def test_every_turn_stands_in_exactly_one_row_in_order(turns: list[tuple[list[int], list[int]]]) -> None:
    rows = split_into_segments(turns)
    assert [index for row in rows for index in row] == list(range(len(turns)))
    assert all(rows)


@given(turns)
def test_a_row_reads_as_one_text(turns: list[tuple[list[int], list[int]]]) -> None:
    """The last call of a row holds every earlier one at its start, and the row's ids add up to it."""
    for row in split_into_segments(turns):
        whole = [*turns[row[-1]][0], *turns[row[-1]][1]]
        for index in row:
            so_far = [*turns[index][0], *turns[index][1]]
            assert whole[: len(so_far)] == so_far
        lengths = [len(turns[i][0]) + len(turns[i][1]) for i in row]
        assert lengths == sorted(lengths)
        for before, index in pairwise(row):
            assert len(turns[index][0]) > len(turns[before][0]) + len(turns[before][1])


@given(turns)
def test_rows_are_as_long_as_they_can_be(turns: list[tuple[list[int], list[int]]]) -> None:
    rows = split_into_segments(turns)
    for before, after in pairwise(rows):
        previous = [*turns[before[-1]][0], *turns[before[-1]][1]]
        assert not extends(turns[after[0]][0], previous)
