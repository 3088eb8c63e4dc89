"""Agent Lightning's v0 server and runner in a process of their own, so that 0.1.2 can be one of them.

Called by `tests.agl.rig.run_apart`; prints what the runner has posted, as JSON, on the last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from ctxguard.testing.child_process import free_port
from tests.agl.rig import MODEL, Runners, agentlightning_version

TIMEOUT_SECONDS = 60.0


def posted(
    base_url: str, agent: str, client: str, tasks: str, mode: str = "train", tracer: str = "none"
) -> None:
    """Have a runner do the tasks (JSON) and print what it posts, in their order."""
    port = free_port()
    with Runners(f"http://127.0.0.1:{port}", agent, mode="v0", tracer=tracer, client=client) as runners:
        rollouts = asyncio.run(_serve(port, base_url, json.loads(tasks), mode, runners))
    result = {
        "version": agentlightning_version(),
        "rollouts": [_as_json(rollout) for rollout in rollouts],
        "log": runners.output(),
    }
    sys.stdout.write("\n" + json.dumps(result))


async def _serve(port: int, base_url: str, tasks: list[Any], mode: str, runners: Runners) -> list[Any]:
    # Imported while the runner, too, is about it.
    from agentlightning import LLM
    from agentlightning.server import AgentLightningServer

    server = AgentLightningServer(host="127.0.0.1", port=port)
    await server.start()
    try:
        llm = LLM(endpoint=base_url, model=MODEL, sampling_parameters={"temperature": 1.0})
        resources_id = await server.update_resources({"main_llm": llm})
        ids = [
            await server.queue_task(sample=task, mode=mode, resources_id=resources_id)  # type: ignore[arg-type]
            for task in tasks
        ]
        found: dict[str, Any] = {}
        deadline = asyncio.get_running_loop().time() + TIMEOUT_SECONDS
        while len(found) < len(ids):
            found.update({r.rollout_id: r for r in await server.retrieve_completed_rollouts()})
            runners.check()
            assert asyncio.get_running_loop().time() < deadline, runners.output()[-4000:]
            await asyncio.sleep(0.1)
        return [found[rollout_id] for rollout_id in ids]
    finally:
        await server.stop()


def _as_json(rollout: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "reward": rollout.final_reward,
        "triplets": rollout.triplets and len(rollout.triplets),
        "metadata": rollout.metadata,
    }
