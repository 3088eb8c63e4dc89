"""The real parts of Agent Lightning 0.x around a test, started and ended for sure.

    with V1Rig(server.base_url) as rig, rig.runners("tests.agl.agents:agent") as runners:
        ids = rig.enqueue([{"turns": 3}])
        rig.wait(ids)
        assert rig.attempt(ids[0]).status == "failed"

`V1Rig` is 0.3's store server and LLM proxy and, when asked for, a daemon; `V0Rig` is a daemon in v0 mode, which
brings its own server and proxy (0.1.2's too). Runners are processes of their own, as in production: see
`tests.agl.runner_process`. Agent Lightning is imported when a rig is made, which takes its time (a daemon pulls in
torch and verl: 15 s, once per process).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ctxguard.testing.child_process import ChildProcess, free_port

ROOT = Path(__file__).parents[2]
MODEL = "tiny-qwen3"


class EventLoop:
    """An event loop in a thread of its own, for calling coroutines from tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rig", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_seconds: float = 60.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_seconds)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


class Runners:
    """Runner processes: the real `LitAgentRunner` (v1) or the real `Trainer` and its runner (v0 and 0.1.2).

    Args:
        endpoint: URL of the store server (v1) or of the daemon's server (v0).
        agent: ``"module:attribute"``, a `LitAgent` or something that makes one when called without arguments.
        mode: ``"v1"`` or ``"v0"``.
        processes: how many; they are forked from one process that has imported everything.
        hooks: ``"module:attribute"`` of each hook class (v1).
        tracer: ``"otel"``, ``"agentops"``, or ``"none"`` (v0 only).
        client: ``"module:attribute"`` of the client class (v0).
        setup: ``"module:function"`` called in each process before the first rollout.
        environment: more variables; those are how a test tells its agent things.
        search_path: folders put before all others, e.g. one with Agent Lightning 0.1.2.
    """

    def __init__(
        self,
        endpoint: str,
        agent: str,
        *,
        mode: str = "v1",
        processes: int = 1,
        hooks: Sequence[str] = (),
        tracer: str = "otel",
        client: str = "",
        setup: str = "",
        environment: Mapping[str, str] | None = None,
        search_path: Iterable[Path | str] = (),
    ) -> None:
        settings = {
            "endpoint": endpoint,
            "agent": agent,
            "mode": mode,
            "processes": processes,
            "hooks": list(hooks),
            "tracer": tracer,
            "client": client,
            "setup": setup,
        }
        paths = [*map(str, search_path), str(ROOT), os.environ.get("PYTHONPATH")]
        self._command = [sys.executable, "-m", "tests.agl.runner_process", json.dumps(settings)]
        self._environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "AGENTOPS_LOGGING_TO_FILE": "false",  # else into the folder in which the tests are run
            **(environment or {}),
        }
        self._child: ChildProcess | None = None
        self._output = ""

    def output(self) -> str:
        """What the runners have logged, tracebacks of failed rollouts included."""
        return self._child.output() if self._child else self._output

    def __enter__(self) -> Runners:
        self._child = ChildProcess("the runner", self._command, self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._child is not None:
            self._output = self._child.output()
            self._child.stop()
            self._child = None

    def check(self) -> None:
        """Fail with the runner's log where it has ended by itself."""
        if self._child is not None and not self._child.is_running:
            raise self._child.unavailable("has ended")


class V1Rig:
    """Store server and LLM proxy of 0.3 (v1 mode) before a real model server, and a daemon when asked for.

    Args:
        backend: base URL of the model server.
        daemon_class: the `AgentModeDaemon` to make, or None; it then starts the proxy and queues the tasks.
        rollouts_per_task: ``train_rollout_n``.
        adapter: makes triplets of spans; None takes `LlmProxyTraceToTriplet`, which reads the proxy's.
        daemon_options: more arguments of the daemon.
    """

    def __init__(
        self,
        backend: str,
        *,
        model: str = MODEL,
        daemon_class: Any = None,
        rollouts_per_task: int = 4,
        adapter: Any = None,
        llm_timeout_seconds: float = 120.0,
        temperature: float = 1.0,
        **daemon_options: Any,
    ) -> None:
        self.backend = backend_address(backend)
        self.model = model
        self.sampling_parameters = {"temperature": temperature}
        self.daemon: Any = None
        self._daemon_class = daemon_class
        self._adapter = adapter
        self._daemon_options = {
            "train_rollout_n": rollouts_per_task,
            "train_information": {"model": model, "temperature": temperature},
            "tokenizer": None,
            "mini_batch_size": 2,
            "pad_token_id": 0,
            "llm_timeout_seconds": llm_timeout_seconds,
            **daemon_options,
        }
        self._runners: list[Runners] = []

    def __enter__(self) -> V1Rig:
        from agentlightning.adapter import LlmProxyTraceToTriplet
        from agentlightning.llm_proxy import LLMProxy
        from agentlightning.store import InMemoryLightningStore, LightningStoreServer

        self.loop = EventLoop()
        self.adapter = self._adapter or LlmProxyTraceToTriplet()
        self.store = LightningStoreServer(
            InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=free_port()
        )
        self.proxy = LLMProxy(port=free_port(), store=self.store, host="127.0.0.1", launch_mode="mp")
        try:
            self.loop.run(self.store.start())
            if self._daemon_class is None:
                self._start_proxy()
            else:
                self._start_daemon()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for runners in self._runners:
            runners.stop()
        try:
            if self.proxy.is_running():
                self.loop.run(self.proxy.stop())
            self.loop.run(self.store.stop())
        finally:
            if self.daemon is not None and self.daemon._internal_loop is not None:
                self.daemon._internal_loop.call_soon_threadsafe(self.daemon._internal_loop.stop)
            self.loop.close()

    def _start_proxy(self) -> None:
        litellm_params = {"model": f"hosted_vllm/{self.model}", "api_base": f"http://{self.backend}/v1/"}
        self.proxy.update_model_list([{"model_name": self.model, "litellm_params": litellm_params}])
        self.loop.run(self.proxy.start(), 120)
        llm = self.proxy.as_resource(sampling_parameters=self.sampling_parameters)
        self.loop.run(self.store.add_resources({"main_llm": llm}))

    def _start_daemon(self) -> None:
        daemon = self.daemon = self._daemon_class(
            None,
            mode="v1",
            store=self.store,
            llm_proxy=self.proxy,
            adapter=self.adapter,
            **self._daemon_options,
        )
        daemon.start()
        deadline = time.monotonic() + 10
        while (
            daemon._internal_loop is None
        ):  # its thread sets it; set_up_data_and_server does not wait for that
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def store_url(self) -> str:
        return str(self.store.endpoint)

    def runners(self, agent: str, **options: Any) -> Runners:
        """Runner processes at this rig's store; a context manager."""
        runners = Runners(self.store_url, agent, **options)
        self._runners.append(runners)
        return runners

    # Without a daemon

    def enqueue(self, tasks: Sequence[Any], *, mode: str = "train") -> list[str]:
        """Queue one rollout of each task; returns the rollouts' ids."""
        return [self.loop.run(self.store.enqueue_rollout(input=t, mode=mode)).rollout_id for t in tasks]

    def wait(self, rollout_ids: Sequence[str], timeout_seconds: float = 60.0) -> dict[str, Any]:
        """Wait until the rollouts have ended; returns them by id."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            ended = self.loop.run(self.store.wait_for_rollouts(rollout_ids=list(rollout_ids), timeout=0))
            if len(ended) == len(set(rollout_ids)):
                return {rollout.rollout_id: rollout for rollout in ended}
            for runners in self._runners:
                runners.check()
            if time.monotonic() > deadline:
                logs = "\n".join(runners.output()[-4000:] for runners in self._runners)
                raise AssertionError(f"{len(ended)} of {len(rollout_ids)} rollouts ended:\n{logs}")
            time.sleep(0.1)

    # What the store knows

    def rollout(self, rollout_id: str) -> Any:
        return self.loop.run(self.store.get_rollout_by_id(rollout_id))

    def attempts(self, rollout_id: str) -> list[Any]:
        return list(self.loop.run(self.store.query_attempts(rollout_id)))

    def attempt(self, rollout_id: str) -> Any:
        """The latest attempt."""
        return self.attempts(rollout_id)[-1]

    def spans(self, rollout_id: str) -> list[Any]:
        return list(self.loop.run(self.store.query_spans(rollout_id)))

    def triplets(self, rollout_id: str, adapter: Any = None) -> list[Any]:
        """What a daemon would make of the rollout's spans."""
        spans = self.spans(rollout_id)
        return list((adapter or self.adapter).adapt(spans)) if spans else []


class V0Rig:
    """A daemon in v0 mode with its own server and proxy; works with 0.3 and with 0.1.2.

    Args:
        backend: base URL of the model server.
        daemon_class: the `AgentModeDaemon` to make.
        rollouts_per_task: ``train_rollout_n``.
        daemon_options: more arguments of the daemon.
    """

    def __init__(
        self,
        backend: str,
        daemon_class: Any,
        *,
        model: str = MODEL,
        rollouts_per_task: int = 4,
        llm_timeout_seconds: float = 120.0,
        temperature: float = 1.0,
        **daemon_options: Any,
    ) -> None:
        self.backend = backend_address(backend)
        self.port = free_port()
        self._runners: list[Runners] = []
        options: dict[str, Any] = {
            "train_rollout_n": rollouts_per_task,
            "train_information": {"model": model, "temperature": temperature},
            "tokenizer": None,
            "mini_batch_size": 2,
            "pad_token_id": 0,
            "llm_timeout_seconds": llm_timeout_seconds,
            **daemon_options,
        }
        if not agentlightning_version().startswith("0.1."):
            options["mode"] = "v0"
        self.daemon = daemon_class(self.port, **options)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> V0Rig:
        self.daemon.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for runners in self._runners:
            runners.stop()
        # Both of its servers run in daemon threads; the proxy's cannot be stopped.
        loop = self.daemon.server.loop
        if loop is not None and loop.is_running():
            asyncio.run_coroutine_threadsafe(
                self.daemon.server.stop(), loop
            )  # ends the loop with itself in it
            self.daemon._server_thread.join(10)

    def runners(self, agent: str, **options: Any) -> Runners:
        """Runner processes at this daemon's server; a context manager."""
        runners = Runners(self.endpoint, agent, **{"mode": "v0", "tracer": "none", **options})
        self._runners.append(runners)
        return runners


def backend_address(base_url: str) -> str:
    """``host:port`` of a server's base URL, as daemons want it."""
    return base_url.split("://")[-1].split("/")[0]


def agentlightning_version() -> str:
    import agentlightning

    return str(agentlightning.__version__)


def columns(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tasks as the data of a daemon: a dict of object arrays."""
    import numpy as np

    names = list(tasks[0])
    return {name: np.array([task[name] for task in tasks] + [None], dtype=object)[:-1] for name in names}


def run_apart(
    code: str,
    *arguments: str,
    search_path: Iterable[Path | str] = (),
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> str:
    """Run a module or a function in a process of its own and return what it printed on standard output.

    For another version of Agent Lightning, of which one process can hold only one: give its folder in
    ``search_path``. All that the process started is ended with it.

    Args:
        code: ``"module"``, run like ``python -m``, or ``"module:function"``, called with the arguments.
    """
    module, _, function = code.partition(":")
    starter = (
        "import sys, runpy, importlib; from ctxguard.testing.child_process import die_with_parent; die_with_parent();"
        "f = sys.argv.pop(1); m = sys.argv.pop(1);"
        "getattr(importlib.import_module(m), f)(*sys.argv[1:]) if f else runpy.run_module(m, run_name='__main__')"
    )
    paths = [*map(str, search_path), str(ROOT), os.environ.get("PYTHONPATH")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
    with subprocess.Popen(
        [sys.executable, "-c", starter, function, module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output: dict[Any, str] = {}
        readers = [
            threading.Thread(target=lambda stream=stream: output.update({stream: stream.read()}))
            for stream in (process.stdout, process.stderr)
        ]
        for reader in readers:
            reader.start()
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
    logs = output[process.stderr][-6000:]
    assert status == 0, f"{code} ended with {status}\n{output[process.stdout][-2000:]}\n{logs}"
    return output[process.stdout]


def installed_apart(name: str) -> Path:
    """The folder of a package version that lies beside the virtualenv, e.g. ``agentlightning-0.1.2``."""
    folder = Path(sys.prefix) / "apart" / name
    assert folder.is_dir(), f"{folder} is missing; `make test-agl` makes it"
    return folder


def posted(version: str, *arguments: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What a runner posts in v0 mode to the server of its version, ``"0.3.0"`` or ``"0.1.2"``.

    Args:
        arguments: of `tests.agl.v0_scenario.posted`.
    """
    output = run_apart(
        "tests.agl.v0_scenario:posted",
        *arguments,
        search_path=[installed_apart("agentlightning-0.1.2")] if version == "0.1.2" else [],
        environment=environment,
    )
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert result["version"] == version
    return result
