"""A call made again with the same prompt: 1.0.2's server keeps the last in the place of the first."""

from __future__ import annotations

from ctxguard.segments import SegmentCall, Segments

PROMPT = [1, 2, 3]


def answered(segments: Segments, prompt: list[int], generated: list[int]) -> SegmentCall:
    opened = segments.begin()
    place = opened.place([], prompt)
    call = SegmentCall([], place.first_prompt_tokens(len(prompt)), prompt, [*prompt, *generated])
    segments.end(opened, call, place)
    return call


def test_it_may_take_the_place_of_the_call_before_it_in_that_ones_row() -> None:
    segments = Segments()
    answered(segments, PROMPT, [4])
    joined = answered(segments, [*PROMPT, 4, 5, 6, 7], [8])
    assert joined.first_prompt_tokens == 3
    place = segments.begin().place([], [*PROMPT, 4, 5, 6, 7])
    assert place.starts, "0.3.0 makes a row of it"
    assert place.row_starts == (3,), "in 1.0.2 it stands in the row of the call that it takes the place of"


def test_without_ids_the_messages_tell() -> None:
    message = {"role": "user", "content": "again"}
    call = SegmentCall([message], 3)
    assert call.joined_by([message], None) == ("may_join", "")
    assert call.joined_by([{"role": "user", "content": "other"}], None)[0] == "starts"
