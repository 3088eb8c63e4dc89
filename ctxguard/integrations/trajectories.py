"""Rows of a trainer that merges a trajectory's turns: which turns share one. Free of any framework."""

from __future__ import annotations

from collections.abc import Sequence

from ctxguard.segments import extends

__all__ = ["extends", "split_into_segments"]


def split_into_segments(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """The turns of a rollout, grouped into the rows that they make.

    A row starts at the first turn and at each turn whose prompt does not extend the call before it. This is
    stricter than Agent Lightning 0.3.0's own merge (``verl/daemon.py``), which looks for the previous ids in
    prompt *and* answer: an answer that repeats what its prompt left out then passes for an extension, and
    the row's mask no longer has the length of its ids.

    Args:
        turns: for each call of the rollout, in order, ``(prompt ids, generated ids)``.

    Returns:
        For each row the indices of its turns, ascending; every index stands in exactly one row.

    Example:
        >>> split_into_segments([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 9], [6])])
        [[0, 1], [2]]
    """
    rows: list[list[int]] = []
    previous: list[int] = []
    for index, (prompt_ids, generated_ids) in enumerate(turns):
        if extends(prompt_ids, previous):
            rows[-1].append(index)
        else:
            rows.append([index])
        previous = [*prompt_ids, *generated_ids]
    return rows
