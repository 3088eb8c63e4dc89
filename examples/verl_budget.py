"""Take the budget from the training configuration: the lengths that verl trains with are the ones that hold.

``MODEL=Qwen/Qwen3-8B TOKENIZER=/models/Qwen3-8B python -m examples.verl_budget``
"""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from ctxguard import BudgetError, ContextBudget, wrap_openai

CONFIG: dict[str, Any] = {
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "truncation": "error"},
    "actor_rollout_ref": {"rollout": {"name": "vllm", "max_model_len": 20480}},
}
"""The run's configuration; an OmegaConf object or the path of a Hydra YAML file does as well."""


def main() -> None:
    """Show what the configuration implies, and what happens to one that contradicts itself."""
    budget = ContextBudget.from_verl(CONFIG)
    print(
        f"window {budget.window}, prompt at most {budget.prompt_limit()}, response {budget.response_reserve}"
    )

    contradiction = {**CONFIG, "data": {"max_prompt_length": 16384, "max_response_length": 8192}}
    try:
        ContextBudget.from_verl(contradiction)
    except BudgetError as error:
        print(f"refused: {error}")

    client = wrap_openai(OpenAI(), budget, tokenizer=os.environ.get("TOKENIZER"))
    messages: list[Any] = [{"role": "user", "content": "Remember this number: 7."}]
    for number in range(40):
        messages.append(
            {"role": "assistant", "content": f"I think of it for the time number {number}. " * 80}
        )
        messages.append({"role": "user", "content": "Which number was it?"})
    answer = client.chat.completions.create(model=os.environ["MODEL"], messages=messages)
    served = answer.usage.prompt_tokens if answer.usage else "unknown"
    print(f"{len(messages)} messages, prompt tokens served: {served}")


if __name__ == "__main__":
    main()
