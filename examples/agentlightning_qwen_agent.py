"""Qwen-Agent with MCP tools as an agent of Agent Lightning 0.3: prompts fit the lengths it is trained with.

``OPENAI_BASE_URL=… MODEL=… TOKENIZER=… python -m examples.agentlightning_qwen_agent`` runs one
rollout; with ``--train``, which needs a GPU, it trains.
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
ROLLOUT = {"name": "vllm", "max_model_len": 20480, "n": 8}
ACTOR = {"ppo_mini_batch_size": 8, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20480}
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "train_batch_size": 8},
    "actor_rollout_ref": {"model": {"path": MODEL}, "rollout": ROLLOUT, "actor": ACTOR},
}
GIT = {"command": PYTHON, "args": ["-m", "mcp_server_git", "--repository", HERE]}
SERVERS = {"git": GIT, "time": {"command": PYTHON, "args": ["-m", "mcp_server_time"]}}
TASKS = [{"question": f"Who made the last commit in {HERE}, and when?", "answer": "Ada"}] * 8
use_guard(Guard(ContextBudget.from_verl(CONFIG), tokenizer=os.environ.get("TOKENIZER")))


@functools.cache
def tools() -> list[Any]:
    """The MCP servers of this process: started once, in the runner, and not for each rollout."""
    return MCPManager().initConfig({"mcpServers": SERVERS})


@mark_failures
class ToolAgent(agl.LitAgent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        agent = Assistant(llm=llm_config(resources, rollout, max_tokens=1024), function_list=tools())
        said = agent.run_nonstream([{"role": "user", "content": task["question"]}])
        return float(task["answer"] in said[-1]["content"])


if __name__ == "__main__":
    if "--train" in sys.argv:
        from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer

        algorithm = agl.VERL(CONFIG, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer)
        agl.Trainer(algorithm=algorithm, n_runners=8).fit(ToolAgent(), TASKS, val_dataset=TASKS)
    else:
        agl.setup_logging()  # says how the rollout ended
        resources: Any = {"main_llm": agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model=MODEL)}
        agl.Trainer(tracer=agl.OtelTracer(), initial_resources=resources).dev(ToolAgent(), TASKS[:1])
