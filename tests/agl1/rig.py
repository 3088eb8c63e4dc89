"""The real agl-server and agl-controller of Agent Lightning 1.0.2, started and ended cleanly.

They run on the Python that CTXGUARD_AGL1_PYTHON names (3.12), else on this one. The child is this file again: it
arranges to die with its parent and then becomes Agent Lightning's own entry point.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ctxguard.testing.child_process import ChildProcess, die_with_parent, free_port

ROOT = Path(__file__).parents[2]
KEY = "agl-test-key"
AGENTS = "tests.agl1.agents"


class Agl1:
    """Server and local controller as a context manager.

    Args:
        folder: for what Hydra writes.
        model: name under which the gateway asks its model servers.
        runs_agents: whether to start the controller; without it somebody else plays the agents.
        agent_slots: agents that run at once.
        environment: variables for the agents.
        key: the server's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "tiny-qwen3",
        runs_agents: bool = True,
        agent_slots: int = 2,
        environment: Mapping[str, str] | None = None,
        key: str = KEY,
    ) -> None:
        self.key = key
        self.folder = folder
        self.model = model
        self.runs_agents = runs_agents
        self.agent_slots = agent_slots
        self.environment = dict(environment or {})
        self.url = ""
        self._children: list[ChildProcess] = []
        self._managers: list[Any] = []

    def __enter__(self) -> Agl1:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        try:
            server = self._start(
                "server",
                "host=127.0.0.1",
                f"port={port}",
                f"key={self.key}",
                f"default_proxy.model_name={self.model}",
            )
            server.wait_until(self._is_healthy, 120)
            if self.runs_agents:
                self._start(
                    "controller",
                    "runner_type=local",
                    f"agl_server.url={self.url}",
                    f"agl_server.key={self.key}",
                    f"local_runner.maximum_size={self.agent_slots}",
                    "local_runner.poll_interval=0.2",
                )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for manager in self._managers:
            manager.client.close()
        for child in reversed(self._children):
            child.stop(grace_seconds=10.0)  # the controller kills its agents
        self._children.clear()

    def log(self) -> str:
        """What server, controller and agents have written."""
        return "\n".join(child.output() for child in self._children)

    def _start(self, part: str, *settings: str) -> ChildProcess:
        python = os.environ.get("CTXGUARD_AGL1_PYTHON") or sys.executable
        command = [python, __file__, part, *settings, f"hydra.run.dir={self.folder / part}"]
        environment = {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", **self.environment}
        child = ChildProcess(f"agl-{part}", command, environment)
        self._children.append(child)
        return child

    def _is_healthy(self) -> bool | None:
        try:
            return self.get("/healthz") == {"status": "ok"} or None
        except OSError:
            return None

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)

    def manager(self, kind: type[Any], agent: str, servers: Sequence[str] = (), **options: Any) -> Any:
        """A rollout manager of a class, with the model servers registered."""
        manager = kind(
            **{
                "agl_base_url": self.url,
                "agl_key": self.key,
                "model": self.model,
                "step": 1,
                "train_rollout_n": 1,
                "rollout_timeout_seconds": 120,
                "poll_interval_seconds": 0.2,
                "local_agent_class": f"{AGENTS}:{agent}",
                "local_env_map": {"TASK": "input.task"},
                **options,
            }
        )
        self._managers.append(manager)
        if servers:
            manager.delete_model()
            manager.register_model(list(servers))
        return manager


def tasks(*tasks: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as the trainer gives it to a manager: one task each."""
    import numpy as np

    return {"task": np.array([json.dumps(task) for task in tasks], dtype=object)}


def kinds(rollout: Any) -> list[str]:
    """A completed rollout's events in order; calls with their status, e.g. ``model_request 400``."""
    return [
        f"{event['event_type']} {event['data'].get('http_status')}"
        if event["event_type"] == "model_request"
        else event["event_type"]
        for event in rollout.events
    ]


def marks(rollout: Any) -> list[dict[str, Any]]:
    """The data of a completed rollout's marks."""
    return [event["data"] for event in rollout.events if event["event_type"] == "ctxguard.failed"]


if __name__ == "__main__":
    die_with_parent()
    part = sys.argv.pop(1)
    runpy.run_module(f"agentlightning.{part}.__main__", run_name="__main__", alter_sys=True)
