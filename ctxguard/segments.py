"""Segments: the rows that a trainer makes of a rollout when it merges calls that go on from each other.

The trainer looks at token ids. A call whose prompt starts with the ids of the call before it (prompt and
answer) joins that call's row; any other starts a row of its own. Of a row, the first prompt has a limit,
and everything behind it, observations included, has another. So whether a call still fits depends on the
call before it: this module remembers that one, and says which row the next prompt would join.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Standing = Literal["joins", "may_join", "starts"]
"""How a prompt stands to the call before it: it goes on from it, it may (or the trainer's versions differ),
or it starts a row."""

NO_IDS_FROM_SERVER = "the server returned no token ids"
NO_IDS_FROM_COUNTER = "the counter gives no token ids"
COUNT_DIFFERS = "the server's token ids of a prompt were not the counter's"
CALL_UNSEEN = "a call of the rollout went past the guard"
CALLS_OVERLAP = "calls of the rollout overlapped, and the trainer's order of them is not known"
COUNT_ESTIMATED = "the count is an estimate"


def extends(prompt_ids: Sequence[int], previous_ids: Sequence[int]) -> bool:
    """Whether a prompt goes on where the previous call ended.

    Args:
        prompt_ids: token ids of the prompt.
        previous_ids: the previous call's prompt ids and generated ids in a row.

    Returns:
        True if the prompt starts with all of ``previous_ids`` and is longer. An empty ``previous_ids`` is
        no call, so nothing extends it.
    """
    return 0 < len(previous_ids) < len(prompt_ids) and _starts_with(prompt_ids, previous_ids)


def _starts_with(ids: Sequence[int], head: Sequence[int]) -> bool:
    return len(ids) >= len(head) and list(ids[: len(head)]) == list(head)


@dataclass
class SegmentCall:
    """One call of a rollout, as the trainer sees it.

    Attributes:
        messages: what was sent.
        first_prompt_tokens: tokens of the first prompt of its row.
        counted_ids: ids of its prompt as the counter gives them, None where it gives none.
        ids: ids of prompt and answer as the server returned them, None while it has not.
    """

    messages: Sequence[Any] = field(repr=False)
    first_prompt_tokens: int
    counted_ids: Sequence[int] | None = field(default=None, repr=False)
    ids: Sequence[int] | None = field(default=None, repr=False)
    ended: int = 0

    def joined_by(self, messages: Sequence[Any], prompt_ids: Sequence[int] | None) -> tuple[Standing, str]:
        """How a prompt stands to this call, and why that is not certain (``""`` where it is).

        Without the ids of one side, what can be compared is: the ids of both prompts, or the messages.
        """
        if self._is_repeated_by(messages, prompt_ids):
            # 0.3.0 makes a row of it; 1.0.2's server keeps the last of equal prompts, in this one's place.
            return "may_join", ""
        if self.ids is not None and prompt_ids is not None:
            if extends(prompt_ids, self.ids):
                return "joins", ""
            # A prompt that is the call before it and no more: 1.0.2 merges the two, 0.3.0 mangles the row.
            return ("may_join" if list(prompt_ids) == list(self.ids) else "starts"), ""
        why = NO_IDS_FROM_COUNTER if prompt_ids is None else NO_IDS_FROM_SERVER
        if self.counted_ids is not None and prompt_ids is not None:
            goes_on = extends(prompt_ids, self.counted_ids)
        else:
            sent = list(self.messages)
            goes_on = len(messages) > len(sent) and list(messages[: len(sent)]) == sent
        return ("joins", why) if goes_on else ("starts", "")

    def _is_repeated_by(self, messages: Sequence[Any], prompt_ids: Sequence[int] | None) -> bool:
        if prompt_ids is None or self.counted_ids is None:
            return list(messages) == list(self.messages)
        return list(prompt_ids) == list(self.counted_ids)


@dataclass(frozen=True)
class Place:
    """Where a prompt would stand among the trainer's rows.

    Attributes:
        starts: it may be the first prompt of a row.
        row_starts: tokens of the first prompt of each row that it may join.
        conditional: why this is not certain, ``""`` where it is.
    """

    starts: bool = True
    row_starts: tuple[int, ...] = ()
    conditional: str = ""

    def first_prompt_tokens(self, prompt_tokens: int) -> int:
        """Tokens of the first prompt of its row; where several rows are possible, the fewest."""
        return min((*self.row_starts, prompt_tokens) if self.starts else self.row_starts)


@dataclass(frozen=True)
class SegmentReport:
    """Where a prompt stands among the trainer's rows, as far as it is known before it is sent.

    Attributes:
        starts: it starts a row (or may: then it is held to the limits of both cases).
        first_prompt_tokens: tokens of the first prompt of its row.
        conditional: why this, and so the promise for its row, is not certain; ``""`` where it is.
    """

    starts: bool
    first_prompt_tokens: int
    conditional: str = ""


@dataclass(frozen=True, eq=False)
class OpenCall:
    """A call on its way: when it began, the calls that may be the one before it, and whether it is alone."""

    began: int
    previous: tuple[SegmentCall, ...]
    alone: bool

    def place(self, messages: Sequence[Any], prompt_ids: Sequence[int] | None) -> Place:
        """Where a prompt of this call stands."""
        standings = [(call, *call.joined_by(messages, prompt_ids)) for call in self.previous]
        joined = [(call, why) for call, standing, why in standings if standing != "starts"]
        surely = self.alone and len(standings) == 1 and standings[0][1] == "joins"
        return Place(
            starts=not surely,
            row_starts=tuple(call.first_prompt_tokens for call, _ in joined),
            conditional=next((why for _, why in joined if why), "" if self.alone else CALLS_OVERLAP),
        )


class Segments:
    """The calls of one rollout that may be the one before the next. Thread-safe.

    After calls one by one it is the last. Calls that overlap come in one order or the other, as the trainer
    sorts them (by start or by end), so each of them may be.

    Attributes:
        rows: rows begun so far (at most, where calls overlapped or were made twice).
        conditional: why the promise for this rollout's rows is not certain, ``""`` where it is.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.conditional = ""
        self._last: list[SegmentCall] = []
        self._open: set[OpenCall] = set()
        self._clock = 0
        self._lock = threading.Lock()

    def begin(self) -> OpenCall:
        """A call begins; it must come to `end` or `abandon`."""
        with self._lock:
            self._clock += 1
            call = OpenCall(self._clock, tuple(self._last), not self._open)
            self._open.add(call)
            return call

    def end(self, opened: OpenCall, call: SegmentCall, place: Place) -> int:
        """The call was answered, and stands at ``place``. Returns the number of its row, from 1."""
        with self._lock:
            self._open.discard(opened)
            self._clock += 1
            call.ended = self._clock
            self._last = [other for other in self._last if other.ended > opened.began] + [call]
            self.rows += place.starts
            self.conditional = self.conditional or place.conditional
            return self.rows

    def abandon(self, opened: OpenCall) -> None:
        """The call was not answered: no row has it. Nothing happens after `end`."""
        with self._lock:
            self._open.discard(opened)

    def doubt(self, reason: str) -> None:
        """Note why the promise is not certain; the first reason stays."""
        with self._lock:
            self.conditional = self.conditional or reason

    def forget(self, reason: str) -> None:
        """A call was made that nothing is known of, so none is known to be the last."""
        with self._lock:
            self._last = []
            self.conditional = self.conditional or reason
