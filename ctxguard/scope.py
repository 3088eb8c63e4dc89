"""The scope of one rollout: its ids, its counters, and whether it has failed.

A wrapped client is shared by parallel rollouts; what belongs to one rollout lives here. The scope
travels by contextvar (asyncio tasks and ``asyncio.to_thread`` inherit it); for plain threads it is
bound to the client (`Guard.wrap` inside the scope does so).
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from ctxguard.errors import ContextOverflowError
from ctxguard.events import Answered, Compacted, Counted, Event, Refused
from ctxguard.segments import Segments

_ROLLOUT_PATH = re.compile(r"/rollout/([^/]+)(?:/attempt/([^/]+))?")
_current: ContextVar[RolloutScope | None] = ContextVar("ctxguard_scope", default=None)


@dataclass(frozen=True)
class CallCounts:
    """Calls of one rollout.

    Attributes:
        tried: calls made through a wrapped client.
        ok: calls that were answered.
        overflow: calls that ended in a context overflow.
        compacted: calls for which the history was compacted.
        refused: requests that the server refused for their length (recovered ones included).
        peak_prompt_tokens: the largest prompt sent, in tokens.
    """

    tried: int = 0
    ok: int = 0
    overflow: int = 0
    compacted: int = 0
    refused: int = 0
    peak_prompt_tokens: int = 0


@dataclass
class RolloutScope:
    """One rollout (or one attempt of it). Safe to share between the threads and tasks of a rollout.

    Attributes:
        rollout_id: identifies the rollout.
        attempt_id: identifies the attempt, None where there is no such notion.
        events: the newest events of the rollout, oldest first (at most ``MAX_EVENTS``).
        failure: the first unrecoverable overflow, kept even if the agent swallowed it.
        answered_after_failure: whether a later call was answered.
        config_fingerprint: digest of the settings of the guard that its calls went through.
        segments: the rows that a trainer makes of its calls (with a budget of level ``"trajectory"``).
        closed: True once the rollout has ended; a closed scope takes no more calls.
    """

    MAX_EVENTS = 10_000

    rollout_id: str
    attempt_id: str | None = None
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=RolloutScope.MAX_EVENTS), repr=False)
    failure: ContextOverflowError | None = field(default=None, repr=False)
    answered_after_failure: bool = False
    config_fingerprint: str = ""
    closed: bool = False
    segments: Segments = field(default_factory=Segments, repr=False, compare=False)
    _counts: CallCounts = field(default_factory=CallCounts, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def calls(self) -> CallCounts:
        """The counts so far."""
        return self._counts

    def begin_call(self) -> int:
        """Count a call as tried; returns its running number, from 1."""
        with self._lock:
            self._counts = replace(self._counts, tried=self._counts.tried + 1)
            return self._counts.tried

    def record(self, event: Event) -> None:
        """Take note of an event and bring the counts up to date."""
        with self._lock:
            self.events.append(event)
            counts = self._counts
            if isinstance(event, Answered):
                self._answered()
            elif isinstance(event, Compacted):
                self._counts = replace(counts, compacted=counts.compacted + 1)
            elif isinstance(event, Refused):
                self._counts = replace(counts, refused=counts.refused + 1)
            elif isinstance(event, Counted):
                peak = max(counts.peak_prompt_tokens, event.prompt_tokens)
                self._counts = replace(counts, peak_prompt_tokens=peak)

    def answered(self) -> None:
        """Count a call as answered that left no event (the guard was off)."""
        with self._lock:
            self._answered()

    def _answered(self) -> None:
        self._counts = replace(self._counts, ok=self._counts.ok + 1)
        self.answered_after_failure = self.failure is not None

    def latch(self, failure: ContextOverflowError) -> None:
        """Remember an unrecoverable overflow; the first one stays."""
        with self._lock:
            self._counts = replace(self._counts, overflow=self._counts.overflow + 1)
            self.answered_after_failure = False
            if self.failure is None:
                self.failure = failure


def current_scope() -> RolloutScope | None:
    """The scope of the running rollout, or None outside of one."""
    scope = _current.get()
    return scope if scope is not None and not scope.closed else None


@contextmanager
def open_scope(rollout_id: str | None = None, attempt_id: str | None = None) -> Iterator[RolloutScope]:
    """Open a scope for one rollout; nested scopes shadow outer ones.

    Args:
        rollout_id: id of the rollout; a random one when None.
        attempt_id: id of the attempt, if there is such a notion.
    """
    scope = RolloutScope(rollout_id or f"rollout-{uuid.uuid4().hex[:12]}", attempt_id)
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)
        scope.closed = True


def ids_from_url(url: str) -> tuple[str, str | None] | None:
    """Rollout and attempt id from a base URL such as ``…/rollout/R/attempt/A/v1``, or None."""
    match = _ROLLOUT_PATH.search(url)
    return (match[1], match[2]) if match else None


def server_identity(url: str) -> str:
    """The server behind a base URL: rollout and attempt segments taken out, no trailing slash.

    What is learnt about a server in one rollout then helps the next.
    """
    return _ROLLOUT_PATH.sub("", url).rstrip("/")
