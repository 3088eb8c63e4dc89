"""Writing the mark of a failed rollout where Agent Lightning carries it.

Two carriers: a span of the attempt (0.3, v1 mode), written at once, and metadata (of the attempt in v1 mode,
of the rollout in v0 mode), which can only be written once the rollout function has ended. Until then the mark
waits here, in the process of the runner.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ctxguard.integrations.marks import METADATA_KEY, SPAN_ATTRIBUTE, SPAN_NAME, FailureMark

logger = logging.getLogger("ctxguard")

MAX_WAITING = 1_024


class WaitingMarks:
    """Marks of rollouts that have failed in this process, until something writes them into metadata.

    Holds the newest `MAX_WAITING`: where neither hook nor client is registered nobody fetches them.
    """

    def __init__(self) -> None:
        self._marks: OrderedDict[str, FailureMark] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, mark: FailureMark) -> None:
        """Keep the mark of a rollout; it replaces one of an earlier attempt. ``""`` is a rollout unknown."""
        with self._lock:
            self._marks.pop(mark.rollout_id, None)
            self._marks[mark.rollout_id] = mark
            if len(self._marks) > MAX_WAITING:
                self._marks.popitem(last=False)

    def take(self, rollout_id: str, attempt_id: str | None = None) -> FailureMark | None:
        """The mark of a rollout, once. One of another attempt is thrown away."""
        with self._lock:
            mark = self._marks.pop(rollout_id, None)
        known = mark is not None and None not in (attempt_id, mark.attempt_id)
        return None if mark is None or (known and mark.attempt_id != attempt_id) else mark


waiting_marks = WaitingMarks()


def write_mark(mark: FailureMark) -> None:
    """Write the mark into the running trace, and keep it for whoever writes the metadata."""
    waiting_marks.put(mark)
    tracer = active_tracer()
    if tracer is None:
        return
    try:
        tracer.create_span(SPAN_NAME, attributes={SPAN_ATTRIBUTE: mark.to_json()})
    except Exception:  # a tracer's trouble must not take the place of what made the rollout fail
        logger.warning(
            "rollout %s: its failure could not be marked by a span", mark.rollout_id, exc_info=True
        )


def stamp(rollout: Any) -> None:
    """Write the waiting mark of a rollout, if there is one, into its metadata (v0 mode).

    Args:
        rollout: what is about to be posted: ``rollout_id``, ``metadata``, ``final_reward``, ``triplets``.
    """
    mark = waiting_marks.take(rollout.rollout_id)
    if mark is None and rollout.final_reward is None and not rollout.triplets:
        # A function of (task, llm) is not told its rollout in v0 mode. A runner does one rollout after the
        # other and posts each: the failure that waits is that of what it posts now.
        mark = waiting_marks.take("")
    if mark is not None:
        mark = replace(mark, rollout_id=rollout.rollout_id)
        rollout.metadata = {**(rollout.metadata or {}), METADATA_KEY: mark.to_dict()}


def active_tracer() -> Any:
    """Agent Lightning's tracer of the running rollout (0.3), or None."""
    # Looked up, not imported: where nobody has loaded the module no tracer is active.
    base = sys.modules.get("agentlightning.tracer.base")
    get: Callable[[], Any] | None = getattr(base, "get_active_tracer", None)
    return get() if get is not None else None
