"""What an agent's process knows of Agent Lightning 1.0's server: three environment variables, and plain HTTP.

The controller sets ``AGL_OPENAI_BASE_URL``, ``AGL_EVENT_URL`` and ``AGL_KEY`` for each rollout, whether it
runs the agent as a local process or as a Kubernetes job. Only the standard library is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxguard.budget import ContextBudget
from ctxguard.client.served import ModelServer
from ctxguard.errors import ConfigurationError, ServerUnavailableError
from ctxguard.integrations.marks import METADATA_KEY

BASE_URL, EVENT_URL, KEY = "AGL_OPENAI_BASE_URL", "AGL_EVENT_URL", "AGL_KEY"
MODEL_URL, MODEL_NAME = "CTXGUARD_MODEL_URL", "CTXGUARD_MODEL_NAME"

TRIES = 3
TIMEOUT_SECONDS = 30.0

_EVENT_PATH = re.compile(r"(?P<root>.+)/api/rollouts/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)/events/?")


@dataclass(frozen=True)
class Gateway:
    """The server as one rollout sees it.

    Attributes:
        openai_url: base URL for an OpenAI client; the server forwards only this rollout's calls and records
            each as an event to train on.
        event_url: where this rollout's events go.
        key: the server's key, ``""`` where it has none.
    """

    openai_url: str
    event_url: str
    key: str = ""

    @classmethod
    def from_environment(cls) -> Gateway:
        """The server that the controller named.

        Raises:
            ConfigurationError: a variable is missing or is not what the controller of 1.0 sets.
        """
        missing = [name for name in (BASE_URL, EVENT_URL) if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(
                f"{' and '.join(missing)} not set: Agent Lightning's controller sets them for each rollout. "
                "Start the agent through agl-controller, or set them yourself"
            )
        gateway = cls(os.environ[BASE_URL], os.environ[EVENT_URL], os.environ.get(KEY, ""))
        gateway._parts()
        return gateway

    @property
    def rollout_id(self) -> str:
        """Id of the rollout."""
        return self._parts()["rollout"]

    @property
    def attempt_id(self) -> str:
        """Id of the attempt; always ``"0"`` in 1.0."""
        return self._parts()["attempt"]

    def _parts(self) -> Mapping[str, str]:
        match = _EVENT_PATH.fullmatch(self.event_url)
        if match is None:
            raise ConfigurationError(
                f"{EVENT_URL}={self.event_url!r} is no event address of Agent Lightning 1.0; expected "
                "…/api/rollouts/ROLLOUT/attempt/ATTEMPT/events"
            )
        return match.groupdict()

    def post(self, event_type: str, data: Mapping[str, Any]) -> None:
        """Append an event to the rollout.

        Raises:
            ServerUnavailableError: the server did not take it.
        """
        request_json("POST", self.event_url, self.key, {"event_type": event_type, "data": dict(data)})

    def posted_reward(self) -> float | None:
        """The newest reward that was posted for this rollout, as the trainer reads it; None without one.

        Raises:
            ServerUnavailableError: the server did not answer.
        """
        events = request_json("GET", f"{self._rollout_url}/events?event_type=reward", self.key)
        return reward_in(events[-1].get("data")) if events else None

    def told(self) -> Told:
        """What the trainer's side tells the agents: budget and model server (see `Told`).

        Raises:
            ServerUnavailableError: the server did not answer.
        """
        rollout = request_json("GET", self._rollout_url, self.key)["rollout"]
        return Told.read((rollout.get("metadata") or {}).get(METADATA_KEY))

    def model_server(self, told: Told) -> ModelServer | None:
        """Where the model itself is served: what the environment says, or the trainer; None if nobody does.

        Of several servers it is the one that the gateway gives this rollout (1.0.2 ``server/proxy.py``,
        ``select_server``), so that its prefix cache is warm.
        """
        url = os.environ.get(MODEL_URL)
        if url:
            return ModelServer(url, os.environ.get(MODEL_NAME) or told.model)
        if not told.servers:
            return None
        number = int.from_bytes(hashlib.sha256(self.rollout_id.encode()).digest()[:8], "big")
        servers = sorted(told.servers)
        return ModelServer(servers[number % len(servers)], told.model)

    @property
    def _rollout_url(self) -> str:
        parts = self._parts()
        return f"{parts['root']}/api/rollouts/{parts['rollout']}"


@dataclass(frozen=True)
class Told:
    """What the trainer's side tells each agent, in the rollout's metadata under ``"ctxguard"``.

    Attributes:
        budget: what the trainer's configuration allows a prompt and a response, None where it says nothing.
        servers: base URLs of the model servers behind the gateway.
        model: name under which they serve the model.
    """

    budget: ContextBudget | None = None
    servers: tuple[str, ...] = ()
    model: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `read` reads."""
        budget = None if self.budget is None else self.budget.model_dump(mode="json")
        return {"budget": budget, "servers": list(self.servers), "model": self.model}

    @classmethod
    def read(cls, data: Any) -> Told:
        """Read `to_dict`'s form; an empty one for anything else."""
        if not isinstance(data, Mapping):
            return cls()
        budget = data.get("budget")
        return cls(
            None if budget is None else ContextBudget.model_validate(budget),
            tuple(data.get("servers") or ()),
            data.get("model"),
        )


def reward_in(data: Any) -> float | None:
    """The reward in a reward event's data, by Agent Lightning's own rule; None where there is none."""
    value = data.get("value") if isinstance(data, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def request_json(method: str, url: str, key: str = "", body: Any = None) -> Any:
    """One request to Agent Lightning's server, tried again when the server is out of reach or broken.

    Raises:
        ServerUnavailableError: no answer after `TRIES` tries, or the server refuses the request.
    """
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body, allow_nan=False).encode()
    number = 0
    while True:
        number += 1
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.load(answer)
        except OSError as error:  # URLError, HTTPError, a time-out
            status = getattr(error, "code", None)
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            if number == TRIES or (status is not None and status < 500):
                what = f"status {status}" if status is not None else f"{type(error).__name__}: {error}"
                raise ServerUnavailableError(
                    f"Agent Lightning's server did not take {method} {url} ({what}, try {number} of "
                    f"{TRIES}). Is it running and reachable from here, and is {KEY} its key?",
                    url=url,
                ) from error
        time.sleep(0.5 * number)
