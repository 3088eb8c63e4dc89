"""A LitAgent of Agent Lightning 0.3 with a guarded client: a conversation longer than any prompt may be.

``OPENAI_BASE_URL=… MODEL=… TOKENIZER=… python -m examples.agentlightning_litagent``; ``--train`` needs a GPU.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import agentlightning as agl

from ctxguard import ContextBudget, Guard
from ctxguard.integrations.agentlightning import guarded_client, mark_failures, request_defaults, use_guard

MODEL = os.environ.get("MODEL", "Qwen/Qwen3-8B")
ROLLOUT = {"name": "vllm", "max_model_len": 20480, "n": 8}
ACTOR = {"ppo_mini_batch_size": 8, "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20480}
CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "train_batch_size": 8},
    "actor_rollout_ref": {"model": {"path": MODEL}, "rollout": ROLLOUT, "actor": ACTOR},
}
TASKS = [{"seed": seed, "hours": 24, "requests": 60} for seed in range(8)]
use_guard(Guard(ContextBudget.from_verl(CONFIG), tokenizer=os.environ.get("TOKENIZER")))


def read_logs(client: Any, settings: dict[str, Any], task: Any) -> float:
    """Ask about the log of one hour after the other; the reward is the share of right answers."""
    dice, right, messages = random.Random(task["seed"]), 0, []
    for hour in range(task["hours"]):
        statuses = dice.choices((200, 500), (9, 1), k=task["requests"])
        log = "\n".join(f"{hour:02}:{n % 60:02} GET /orders/{n} {s}" for n, s in enumerate(statuses))
        messages.append({"role": "user", "content": f"How many failed? Say the number.\n{log}"})
        answer = client.chat.completions.create(**settings, messages=messages, max_tokens=16)
        said = answer.choices[0].message.content or "nothing"
        messages.append({"role": "assistant", "content": said})
        right += said.strip() == str(statuses.count(500))
    return right / task["hours"]


@mark_failures
class LogReader(agl.LitAgent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return read_logs(guarded_client(resources, rollout), request_defaults(resources), task)


if __name__ == "__main__":
    if "--train" in sys.argv:
        from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer

        algorithm = agl.VERL(CONFIG, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer)
        agl.Trainer(algorithm=algorithm, n_runners=8).fit(LogReader(), TASKS, val_dataset=TASKS)
    else:
        agl.setup_logging()  # says how the rollout ended
        resources: Any = {"main_llm": agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model=MODEL)}
        agl.Trainer(tracer=agl.OtelTracer(), initial_resources=resources).dev(LogReader(), TASKS[:1])
