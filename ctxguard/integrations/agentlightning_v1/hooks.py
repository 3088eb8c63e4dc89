"""Failed rollouts for an unchanged trainer of Agent Lightning 1.0: a hooks class.

``agentlightning.hooks`` takes the path of a Python file in which exactly one subclass of ``RolloutHooks`` is
visible, imported ones included. Such a file is::

    from ctxguard.integrations.agentlightning_v1.hooks import FailedRolloutHooks

or, with settings or hooks of your own, so that only your class is visible::

    from ctxguard.integrations.agentlightning_v1 import hooks

    class Hooks(hooks.FailedRolloutHooks):
        base_url = "http://agl-server:8080"
        max_prompt_length = 2048

What hooks cannot reach is left to `GuardedTrainer`: groups with a single survivor, the averages of
``training/reward`` and ``val/reward`` (failed rollouts stay in them as the fill value), the metrics, failure
handling other than exclusion, and rollouts that never return.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.hooks import RolloutHooks

from ctxguard.budget import ContextBudget
from ctxguard.errors import ConfigurationError
from ctxguard.integrations.agentlightning_v1.failures import Event, as_events, failure_of, is_good_call
from ctxguard.integrations.agentlightning_v1.gateway import KEY, Told, request_json, reward_in
from ctxguard.integrations.agentlightning_v1.telling import with_told
from ctxguard.integrations.marks import FailureMark

if TYPE_CHECKING:
    from agentlightning.hooks import TraceWriter
    from agentlightning.schemas import Rollout, RolloutCreate

logger = logging.getLogger("ctxguard")

BASE_URL = "AGL_BASE_URL"
DROPPED = "ctxguard.dropped"
"""Event that says of a failed rollout that its rows were taken out."""


class FailedRolloutHooks(RolloutHooks):  # type: ignore[misc]
    """Takes the rows of failed rollouts out of the batch, and counts them.

    A row is taken out by an event that supersedes its call: the view that rows are made of keeps the last
    ``model_request`` for each prompt (1.0.2 ``server/routes/events.py``), and a failed one makes no row.
    That needs the calls' prompt ids, which vLLM returns. Each rollout is judged once, whenever it ends and
    however often it is asked about, so that carried-over rollouts of asynchronous training count once.

    Settings are class attributes, since Agent Lightning makes the hooks itself.

    Attributes:
        succeeded: int, how many rollouts have ended well.
        failed: how many have failed, by `FailureReason` value.
    """

    base_url: str | None = None
    """Agent Lightning's server as the trainer's process reaches it (``agentlightning.agl_base_url``); None
    takes the environment variable ``AGL_BASE_URL``."""

    key: str | None = None
    """Its key (``agentlightning.agl_key``); None takes the environment variable ``AGL_KEY``, if set."""

    max_prompt_length: int | None = None
    """Tokens of the longest prompt that is trained on, exactly as the trainer has it:
    ``agentlightning.trace_aggregator.trajectory_max_prompt_length``, or ``data.max_prompt_length`` at the
    level ``transition``. If given, a failed rollout gets one row that is one token longer, which the trainer
    throws away before it computes advantages: a batch in which *every* rollout failed then skips the step
    instead of stopping the run. A number below the trainer's would be trained on. Leave it None with router
    replay (R3), which wants routed experts of every row."""

    budget: ContextBudget | None = None
    """Told to the agents, whose `guarded_client` takes it where it is given none."""

    def __init__(self) -> None:
        self.succeeded = 0
        """Rollouts that ended well."""
        self.failed: Counter[str] = Counter()
        """Failed rollouts by `FailureReason` value."""
        self._judged: set[str] = set()

    def on_startup(self, store: Any | None = None) -> None:
        """Check the settings.

        Raises:
            ConfigurationError: nobody says where Agent Lightning's server is.
        """
        if not self._server:
            raise ConfigurationError(
                f"FailedRolloutHooks.base_url is not set, nor is {BASE_URL} in the trainer's environment: "
                "give it the value of agentlightning.agl_base_url"
            )

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        """Tell the agent its budget."""
        return request if self.budget is None else with_told(request, Told(budget=self.budget))

    def on_succeeded(self, rollout: Rollout, events: Mapping[str, Sequence[Any]], store: TraceWriter) -> None:
        """A process that ended with status 0 may have failed all the same: it is marked, or has no reward."""
        self._judge(rollout, as_events(event for attempt in events.values() for event in attempt), store)

    def on_failed(self, rollout: Rollout, store: TraceWriter) -> None:
        """A failed rollout's calls leave no rows.

        Raises:
            ServerUnavailableError: its events could not be read; its rows would be trained on.
        """
        url = f"{self._server}/api/rollouts/{rollout.rollout_id}/events?format=triplet"
        self._judge(rollout, as_events(request_json("GET", url, self._key)), store)

    def _judge(self, rollout: Rollout, events: list[Event], store: TraceWriter) -> None:
        if rollout.rollout_id in self._judged:
            return
        rewards = [reward_in(data) for kind, data in events if kind == "reward"]
        failure = failure_of(
            state=str(rollout.status.state.value),
            error_message=rollout.status.error_message,
            events=events,
            reward=rewards[-1] if rewards else None,
        )
        if failure is not None:
            self._take_out(rollout, events, failure, store)
        self._judged.add(rollout.rollout_id)
        if failure is None:
            self.succeeded += 1
        else:
            self.failed[failure.reason] += 1
            self._tell()

    def _take_out(
        self, rollout: Rollout, events: list[Event], failure: FailureMark, store: TraceWriter
    ) -> None:
        attempt = rollout.status.last_attempt_id or "0"
        rows = 0
        for kind, data in events:
            ids = _prompt_ids(data) if kind == "model_request" and is_good_call(data) else []
            if ids:
                rows += 1
                superseding = {"status": "error", "http_status": 400, "response": {"prompt_token_ids": ids}}
                store.add_event(rollout.rollout_id, attempt, "model_request", superseding)
        if self.max_prompt_length is not None:
            store.add_event(rollout.rollout_id, attempt, "model_request", _too_long(self.max_prompt_length))
        facts = {"reason": failure.reason, "rows": rows}
        store.add_event(rollout.rollout_id, attempt, DROPPED, facts)

    def _tell(self) -> None:
        failed = sum(self.failed.values())
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.failed.items()))
        logger.warning("%d of %d rollouts failed so far (%s)", failed, failed + self.succeeded, reasons)

    @property
    def _server(self) -> str:
        return (self.base_url or os.environ.get(BASE_URL, "")).rstrip("/")

    @property
    def _key(self) -> str:
        return os.environ.get(KEY, "") if self.key is None else self.key


def _prompt_ids(data: Mapping[str, Any]) -> list[int]:
    """The prompt ids of a ``model_request`` event, whole or trimmed; empty where it has none."""
    found: Any = data.get("prompt_token_ids")
    response = data.get("response")
    if isinstance(response, Mapping):
        first = (response.get("choices") or [{}])[0]
        found = response.get("prompt_token_ids") or first.get("prompt_token_ids")
    return list(found or ())


def _too_long(max_prompt_length: int) -> dict[str, Any]:
    """A call whose row is thrown away for its length. It has a log-prob: one row without any would take them
    from the whole batch."""
    answer = {"token_ids": [0], "logprobs": {"content": [{"logprob": 0.0}]}}
    response = {"prompt_token_ids": [0] * (max_prompt_length + 1), "choices": [answer]}
    return {"status": "ok", "http_status": 200, "response": response}
