"""Agents that are played over HTTP, for batches too large for a process each: quick, and told what happens to them.

A task says: ``calls`` (list of ``[prompt ids, generated ids]``), ``refused`` (a last call that the server refuses for
its length), ``reward`` (null: none), ``mark`` (a failure mark), ``end``: ``succeeded``, ``failed``, ``hang`` (runs on
for ever) or ``never`` (nobody starts it), ``twice`` (its end is reported again), ``late_seconds`` (after that it ends well, having hung), ``error_message``.
Or it has ``fates``, one such mapping for each of its rollouts, and an ``id`` of its own.
"""

from __future__ import annotations

import json
import threading
import urllib.error
from collections import Counter
from types import TracebackType
from typing import Any

from ctxguard.errors import ServerUnavailableError
from ctxguard.integrations.agentlightning_v1.gateway import request_json
from tests.agl1.rig import KEY, Agl1

REFUSAL = {
    "error": {
        "message": "This model's maximum context length is 20480 tokens. However, you requested 61709 tokens.",
        "type": "BadRequestError",
        "code": 400,
    }
}


class Players:
    """Plays the agents of a server until the block ends."""

    def __init__(self, server: Agl1) -> None:
        self.server = server
        self.seen: set[str] = set()
        self.errors: list[BaseException] = []
        self.refused: Counter[int] = Counter()
        """Reports of an end that the server did not take, by status."""
        self._fates: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._play, name="players", daemon=True)

    def __enter__(self) -> Players:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self.errors, self.errors

    def _play(self) -> None:
        while not self._stop.wait(0.05):
            try:
                for rollout in self._request("GET", "/api/rollouts?state_in=queuing&limit=1000"):
                    if rollout["rollout_id"] not in self.seen:
                        self.seen.add(rollout["rollout_id"])
                        self._act(rollout["rollout_id"], json.loads(rollout["input"]["task"]))
            except BaseException as error:  # handed to the test's own thread
                self.errors.append(error)
                return

    def _act(self, rollout: str, task: dict[str, Any]) -> None:
        if "fates" in task:
            self._fates[task["id"]] += 1
            task = task["fates"][(self._fates[task["id"]] - 1) % len(task["fates"])]
        end = task.get("end", "succeeded")
        if end == "never":
            return
        self._patch(rollout, state="running", last_attempt_id="0")
        for prompt, generated in task.get("calls", ()):
            self._post(rollout, "model_request", call(prompt, generated))
        if task.get("refused"):
            refusal = {"status": "error", "http_status": 400, "response": REFUSAL}
            self._post(rollout, "model_request", refusal)
        if task.get("reward") is not None:
            self._post(rollout, "reward", {"value": task["reward"]})
        if task.get("mark") is not None:
            self._post(rollout, "ctxguard.failed", task["mark"])
        if end == "hang":
            if "late_seconds" in task:
                timer = threading.Timer(task["late_seconds"], self._patch, [rollout], {"state": "succeeded"})
                timer.daemon = True
                timer.start()
            return
        message = {"error_message": task.get("error_message", "subprocess exited with code 1")}
        for _ in range(2 if task.get("twice") else 1):
            self._patch(rollout, state=end, **(message if end == "failed" else {}))

    def _patch(self, rollout: str, **status: Any) -> None:
        try:
            self._request("PATCH", f"/api/rollouts/{rollout}", {"status": status})
        except ServerUnavailableError as error:
            # Ended or deleted in the meantime: 1.0 takes no second end.
            cause = error.__cause__
            if not isinstance(cause, urllib.error.HTTPError) or cause.code not in (404, 409):
                raise
            self.refused[cause.code] += 1

    def _post(self, rollout: str, kind: str, data: dict[str, Any]) -> None:
        path = f"/api/rollouts/{rollout}/attempt/0/events"
        self._request("POST", path, {"event_type": kind, "data": data})

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        return request_json(method, self.server.url + path, KEY, body)


def call(prompt: list[int], generated: list[int]) -> dict[str, Any]:
    """The event that the gateway records of a good call."""
    choice = {"token_ids": generated, "logprobs": {"content": [{"logprob": -0.5} for _ in generated]}}
    response = {"prompt_token_ids": prompt, "choices": [choice]}
    return {"status": "ok", "http_status": 200, "request": {}, "response": response}
