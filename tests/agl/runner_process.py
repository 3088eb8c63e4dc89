"""The runner's process, started by `tests.agl.rig.Runners`: ``python -m tests.agl.runner_process SETTINGS``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
from typing import Any

from ctxguard.testing.child_process import die_with_parent


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def make(name: str) -> Any:
    """An object by name; classes and plain functions are called for one."""
    found = load(name)
    return found() if inspect.isclass(found) or inspect.isfunction(found) else found


def run_v1(settings: dict[str, Any], worker: int) -> None:
    from agentlightning import LitAgentRunner
    from agentlightning.store import LightningStoreClient
    from agentlightning.tracer import AgentOpsTracer, OtelTracer

    async def main() -> None:
        tracer = {"otel": OtelTracer, "agentops": AgentOpsTracer}[settings["tracer"]]()
        runner: Any = LitAgentRunner(tracer=tracer, poll_interval=0.05, interval_jitter=0.0)
        runner.init(agent=make(settings["agent"]), hooks=[make(hook) for hook in settings["hooks"]])
        runner.init_worker(worker, LightningStoreClient(settings["endpoint"]))
        await runner.iter()

    asyncio.run(main())


def run_v0(settings: dict[str, Any]) -> None:
    import agentlightning
    from agentlightning import AgentLightningClient, Trainer

    client_class = load(settings["client"]) if settings["client"] else AgentLightningClient
    client = client_class(endpoint=settings["endpoint"], poll_interval=0.2)
    processes = settings["processes"]
    agent = make(settings["agent"])
    if agentlightning.__version__.startswith("0.1."):
        Trainer(n_workers=processes, tracer=_legacy_tracer(settings["tracer"])).fit(agent, client)
    else:
        Trainer(n_workers=processes, tracer=_legacy_tracer(settings["tracer"])).fit_v0(agent, client)


def _legacy_tracer(name: str) -> Any:
    if name == "agentops":
        from agentlightning.tracer import AgentOpsTracer

        return AgentOpsTracer()
    try:
        from agentlightning.tracer.base import Tracer as Base
    except ImportError:  # 0.1
        from agentlightning.tracer.base import BaseTracer as Base

    class NoTracer(Base):  # type: ignore[misc, valid-type]
        """Records nothing: the agent returns triplets, or only a reward."""

        def trace_context(self, *args: Any, **kwargs: Any) -> Any:
            return contextlib.nullcontext()  # 0.1 says ``with``, 0.3 ``async with``

        _trace_context_sync = trace_context

        def get_last_trace(self) -> list[Any]:
            return []

    return NoTracer()


def main() -> None:
    die_with_parent()  # a thread of this process; forked ones are of its group and end with it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    settings = json.loads(sys.argv[1])
    if settings["setup"]:
        load(settings["setup"])()
    if settings["mode"] == "v0":
        run_v0(settings)
        return
    load(settings["agent"])  # imported once, before the fork
    workers = [
        pid
        for worker in range(1, settings["processes"])
        if (pid := os.fork()) or _run_forked(settings, worker)
    ]
    run_v1(settings, 0)
    for pid in workers:
        os.waitpid(pid, 0)


def _run_forked(settings: dict[str, Any], worker: int) -> bool:
    status = 1
    try:
        run_v1(settings, worker)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
