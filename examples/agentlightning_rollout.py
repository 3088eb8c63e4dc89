"""A rollout function of Agent Lightning 0.3 with a guarded client: it reads more than any prompt may hold.

``OPENAI_BASE_URL=… MODEL=… TOKENIZER=… python -m examples.agentlightning_rollout``; ``--train`` needs a GPU.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import agentlightning as agl

from ctxguard import ContextBudget, Guard
from ctxguard.integrations import agentlightning as guarded

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-8B")
ROLLOUT = {"name": "vllm", "max_model_len": 20480, "n": 8}
ACTOR = {"ppo_mini_batch_size": 8, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20480}
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "train_batch_size": 8},
    "actor_rollout_ref": {"model": {"path": MODEL}, "rollout": ROLLOUT, "actor": ACTOR},
}
FUNCTIONS = inspect.getsource(inspect).split("\ndef ")[1:]
TASKS = [{"find": name, "functions": 60} for name in ("getdoc", "getfile", "getmodule", "getsource")] * 2
guarded.use_guard(Guard(ContextBudget.from_verl(CONFIG), tokenizer=os.environ.get("TOKENIZER")))


async def search(client: Any, settings: dict[str, Any], task: Any) -> float:
    messages: list[Any] = [{"role": "system", "content": f"Say 'found' once you see {task['find']}()."}]
    for function in FUNCTIONS[: task["functions"]]:
        messages.append({"role": "user", "content": function})
        answer = await client.chat.completions.create(**settings, messages=messages, max_tokens=16)
        said = answer.choices[0].message.content or "nothing"
        if "found" in said:
            return float(function.startswith(task["find"] + "("))
        messages.append({"role": "assistant", "content": said})
    return 0.0


@agl.rollout
@guarded.mark_failures
async def finder(task: Any, llm: agl.LLM) -> float:
    async with guarded.guarded_async_client(llm) as client:
        return await search(client, guarded.request_defaults(llm), task)


if __name__ == "__main__":
    if "--train" in sys.argv:
        from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer

        algorithm = agl.VERL(CONFIG, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer)
        agl.Trainer(algorithm=algorithm, n_runners=8).fit(finder, TASKS, val_dataset=TASKS)
    else:
        agl.setup_logging()  # says how the rollout ended
        resources: Any = {"main_llm": agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model=MODEL)}
        agl.Trainer(tracer=agl.OtelTracer(), initial_resources=resources).dev(finder, TASKS[:1])
