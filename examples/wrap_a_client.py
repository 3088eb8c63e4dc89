"""Guard a client in one line: a conversation that outgrows the window goes on.

``MODEL=Qwen/Qwen3-8B TOKENIZER=/models/Qwen3-8B python -m examples.wrap_a_client``

A server that does not tell its window (OpenAI, most gateways) needs WINDOW too, in tokens.
"""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from ctxguard import ContextBudget, wrap_openai


def main() -> None:
    """Ask about one log after another, with the whole conversation in every request."""
    model, window = os.environ["MODEL"], os.environ.get("WINDOW")
    budget = ContextBudget(window=int(window)) if window else None

    client = wrap_openai(OpenAI(), budget, tokenizer=os.environ.get("TOKENIZER"))

    messages: list[Any] = [{"role": "system", "content": "You read logs. Name the errors, nothing else."}]
    for hour in range(24):
        log = "\n".join(f"{hour:02}:{minute:02} GET /orders/{hour * minute} 200" for minute in range(60))
        messages.append({"role": "user", "content": f"The log of hour {hour}:\n{log}"})
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or "nothing"})
        tokens = answer.usage.prompt_tokens if answer.usage else "unknown"
        print(f"hour {hour:2}: {len(messages):2} messages in the history, prompt tokens served: {tokens}")


if __name__ == "__main__":
    main()
