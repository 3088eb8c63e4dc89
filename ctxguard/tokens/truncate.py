"""Cutting the middle out of a text so that it has at most so many tokens, without encoding all of it.

Only a window at the head and one at the tail are encoded; the result is put together, counted as a whole, and
made smaller until it fits. Borders are characters, so the result is valid unicode wherever the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxguard.tokens.segments import TextCounter
from ctxguard.tokens.text import whole_pair

_CHARS_PER_TOKEN = 5
_ROUNDS = 12
_GOOD_ENOUGH = 2


def truncate_text(text: str, max_tokens: int, counter: TextCounter, *, marker: str = "\n…\n") -> str:
    """Head and tail of ``text`` around ``marker``, at most ``max_tokens`` tokens in all.

    Args:
        text: any text.
        max_tokens: the most tokens that the result may have by ``counter.count``; below 1 gives ``""``.
        counter: counts, and tells where tokens begin.
        marker: what stands for the removed middle. Where it does not fit, the result is a head without it.

    Returns:
        ``text`` itself where it fits, else a shorter text that never has more than ``max_tokens`` tokens.
    """
    if max_tokens <= 0 or not text:
        return ""
    if _fits(text, max_tokens, counter):
        return text
    room = max_tokens - counter.count(marker)
    if room <= 0:
        return _head_only(text, max_tokens, counter)
    head = _Side(text, room, counter, from_end=False)
    tail = _Side(text, room, counter, from_end=True)
    best, fits, exceeds = "", 0, 2 * room + 16
    budget = room
    for _ in range(_ROUNDS):
        composed = _compose(text, head, tail, budget, marker)
        unused = max_tokens - counter.count(composed)
        if unused >= 0:
            best, fits = composed, budget
            if unused <= _GOOD_ENOUGH:
                break
        else:
            exceeds = budget
        if exceeds - fits <= 1:
            break
        budget += unused
        if not fits < budget < exceeds:
            budget = (fits + exceeds) // 2
    return best or _head_only(text, max_tokens, counter)


def _compose(text: str, head: _Side, tail: _Side, budget: int, marker: str) -> str:
    end = whole_pair(text, head.chars(budget - budget // 2))
    start = whole_pair(text, len(text) - tail.chars(budget // 2))
    if end >= start:  # both sides meet: give up something, the text did not fit as a whole
        end = whole_pair(text, max(0, start - 1))
    return text[:end] + marker + text[start:]


def _head_only(text: str, max_tokens: int, counter: TextCounter) -> str:
    head = _Side(text, max_tokens, counter, from_end=False)
    for budget in range(max_tokens, 0, -1):
        cut = text[: whole_pair(text, head.chars(budget))]
        if counter.count(cut) <= max_tokens:
            return cut
    return ""


class _Side:
    """How many characters at one end of a text are so many tokens, read off one encoded window."""

    def __init__(self, text: str, tokens: int, counter: TextCounter, *, from_end: bool) -> None:
        self._from_end = from_end
        size = _CHARS_PER_TOKEN * tokens + 64
        while True:
            window = text[max(0, len(text) - size) :] if from_end else text[:size]
            self._starts: Sequence[int] = counter.token_starts(window)
            self._size = len(window)
            if len(self._starts) > tokens or size >= len(text):
                return
            size *= 4

    def chars(self, tokens: int) -> int:
        """Characters in the ``tokens`` outermost tokens; a character cut by the border is left out."""
        starts = self._starts
        if tokens <= 0:
            return 0
        if tokens >= len(starts):
            return self._size
        if not self._from_end:
            return starts[tokens]
        first = len(starts) - tokens
        while first < len(starts) and first > 0 and starts[first] == starts[first - 1]:
            first += 1
        return self._size - starts[first] if first < len(starts) else 0


def _fits(text: str, max_tokens: int, counter: TextCounter) -> bool:
    window = text[: 2 * _CHARS_PER_TOKEN * max_tokens + 1024]
    # Merges across the window's border change a count by a few tokens at most, never by half of it.
    if len(window) < len(text) and counter.count(window) > 2 * max_tokens + 64:
        return False
    return counter.count(text) <= max_tokens
