"""Start a real server as a child process, and be sure that it is gone afterwards.

Used by `ctxguard.testing.llama_cpp` and by the launcher of the vLLM tests. The child runs in a process group
of its own, so that it can be killed with everything that it started. It holds the reading end of a pipe whose
writing end only this process has: when this process ends in whatever way (Ctrl-C, SIGKILL, a crash), the
child reads end-of-file and kills its own group, see `die_with_parent`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ctxguard.errors import ServerUnavailableError

T = TypeVar("T")


class ChildProcess:
    """A server in a child process, with its output in a file.

    The command must call `die_with_parent` early on.

    Args:
        name: what it is, for error messages.
        command: program and arguments.
        environment: variables set on top of this process's own.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Process id, which is the id of its process group too."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child itself is alive."""
        return self._process.poll() is None

    def output(self) -> str:
        """What it has written so far, standard output and standard error together."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    def wait_until(self, answer: Callable[[], T | None], timeout_seconds: float) -> T:
        """Ask ``answer`` again and again until it returns something.

        Raises:
            ServerUnavailableError: the child ended or the time was up; the message has its last lines.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            if (result := answer()) is not None:
                return result
            if not self.is_running:
                raise self.unavailable(f"ended with exit status {self._process.returncode} while starting")
            if time.monotonic() > deadline:
                raise self.unavailable(f"was not ready within {timeout_seconds:g} s")
            time.sleep(0.05)

    def unavailable(self, what: str) -> ServerUnavailableError:
        """The error that says what went wrong, with the last lines of the child's output."""
        lines = "\n".join(self.output().splitlines()[-20:]) or "(no output)"
        return ServerUnavailableError(
            f"{self.name} {what}. Its last lines:\n{lines}", name=self.name, output=lines
        )

    def stop(self, grace_seconds: float = 0.0) -> None:
        """End it and everything that it started; harmless when it is gone already.

        Args:
            grace_seconds: how long it may clean up after SIGTERM before it is killed.
        """
        if self._log.closed:
            return
        if grace_seconds:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._signal_group(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def die_with_parent() -> None:
    """In the child: once the parent is gone, kill this process and all of its group."""

    def watch() -> None:
        # A raw read: it takes no lock that another thread or the interpreter's shutdown could wait for.
        while os.read(stdin, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    stdin = sys.stdin.fileno()
    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def free_port() -> int:
    """A loopback port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
