"""The scenario that started the project, for any v0 daemon: two batches, and what the first leaves behind.

The first batch has a task whose prompt the server refuses. The agent tries again for longer than the server's
task time-out, so the rollout is handed out a second time; by the time that this second attempt reports its
failure the batch is over, and the result lies in the server's store when the second batch begins.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.agl.rig import V0Rig, columns

TASK_TIMEOUT_SECONDS = 6.0
"""More than the 5 s between two looks of the plain daemon, so that it looks between the two attempts' results."""
AGENT = "tests.agl.seed_agent:SeedAgent"
SHORT = {"words": 20, "tries": 1, "pause": 0.0, "think": 0.0, "reward": 1.0}
LONG = {**SHORT, "words": 4000, "tries": 2, "pause": TASK_TIMEOUT_SECONDS + 1}
"""Refused, and out for longer than the time-out."""


def task(**changes: Any) -> dict[str, Any]:
    return {**SHORT, **changes}


class Seed:
    """A daemon with two runner processes before a real server, and the two batches."""

    def __init__(self, backend: str, daemon_class: Any, **runner_options: Any) -> None:
        self.rig = V0Rig(
            backend,
            daemon_class,
            rollouts_per_task=1,
            llm_timeout_seconds=TASK_TIMEOUT_SECONDS,
            mini_batch_size=2,
        )
        self.daemon = self.rig.daemon
        self._runner_options = runner_options

    def __enter__(self) -> Seed:
        self.rig.__enter__()
        self.runners = self.rig.runners(AGENT, processes=2, **self._runner_options)
        self.runners.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.runners.__exit__(*error)
        self.rig.__exit__(*error)

    def run(self, tasks: Sequence[Mapping[str, Any]], *, is_train: bool = True) -> None:
        """Queue a batch and wait for it, as the trainer does."""
        self.daemon.set_up_data_and_server(columns(tasks), [self.rig.backend], is_train=is_train)
        self.daemon.run_until_all_finished()

    def leave_a_stale_result(self) -> None:
        """Run the first batch, and stay until its second attempt has posted what nobody waits for."""
        self.run([SHORT, LONG])
        self.daemon.clear_data_and_server()
        deadline = time.monotonic() + 60
        while not self.daemon.server._store._completed_rollouts:
            self.runners.check()
            assert time.monotonic() < deadline, "no second attempt reported"
            time.sleep(0.1)

    def batch(self) -> tuple[Any, dict[str, Any]]:
        """The training batch, as the trainer asks for it."""
        get = self.daemon.get_train_data_batch
        steps = {"global_steps": 0} if "global_steps" in _parameters(self.daemon) else {}
        result: tuple[Any, dict[str, Any]] = get(2048, 64, torch.device("cpu"), **steps)
        return result


def _parameters(daemon: Any) -> Mapping[str, Any]:
    plain = [kind for kind in type(daemon).__mro__ if kind.__module__.startswith("agentlightning")]
    return inspect.signature(plain[0].get_train_data_batch).parameters
