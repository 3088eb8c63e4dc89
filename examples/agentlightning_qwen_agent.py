"""Qwen-Agent with MCP tools as an agent of Agent Lightning 0.3: prompts fit the lengths it is trained with.

To try it on a served model: ``OPENAI_BASE_URL=http://…/v1 MODEL=Qwen/Qwen3-8B TOKENIZER=/models/Qwen3-8B
python -m examples.agentlightning_qwen_agent``; to train it, which needs a GPU, the same with ``--train``.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import agentlightning as agl
from qwen_agent.agents import Assistant
from qwen_agent.tools.mcp_manager import MCPManager

from ctxguard import ContextBudget, Guard
from ctxguard.integrations.agentlightning import mark_failures
from ctxguard.integrations.qwen_agent import llm_config, use_guard

MODEL, HERE, PYTHON = os.environ.get("MODEL", "Qwen/Qwen3-8B"), os.getcwd(), sys.executable
CONFIG: dict[str, Any] = {
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "truncation": "error"},
    "actor_rollout_ref": {"model": {"path": MODEL}, "rollout": {"max_model_len": 20480, "n": 8}},
}
GIT = {"command": PYTHON, "args": ["-m", "mcp_server_git", "--repository", HERE]}
SERVERS = {"git": GIT, "time": {"command": PYTHON, "args": ["-m", "mcp_server_time"]}}
TASKS = [{"question": f"Who made the last commit in {HERE}, and when?", "answer": "Ada"}]

use_guard(Guard(ContextBudget.from_verl(CONFIG), tokenizer=os.environ.get("TOKENIZER")))


@functools.cache
def tools() -> list[Any]:
    """The MCP servers of this process: started once, in the runner, and not for each rollout."""
    return MCPManager().initConfig({"mcpServers": SERVERS})


@mark_failures
class ToolAgent(agl.LitAgent):
    """A rollout is one run of a Qwen-Agent; its reward is whether its last words hold the answer."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        agent = Assistant(llm=llm_config(resources, rollout, max_tokens=1024), function_list=tools())
        said = agent.run_nonstream([{"role": "user", "content": task["question"]}])
        return float(task["answer"] in said[-1]["content"])


if __name__ == "__main__":
    if "--train" in sys.argv:  # needs a GPU
        from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer

        algorithm = agl.VERL(CONFIG, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer)
        agl.Trainer(algorithm=algorithm, n_runners=8).fit(ToolAgent(), train_dataset=TASKS)
    else:
        llm = agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model=MODEL)
        trainer = agl.Trainer(n_runners=1, tracer=agl.OtelTracer(), initial_resources={"main_llm": llm})
        trainer.dev(ToolAgent(), train_dataset=TASKS)
