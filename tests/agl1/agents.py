"""The agents that the local controller runs, each in a process of its own. ``TASK`` says what to do, as JSON:

words: of the first message; each further turn adds as many. turns: how many calls. reward: what it is worth (null:
none). on_refusal: ``raise``, or ``swallow`` (go on as if nothing had happened). max_tokens: of an answer.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import openai

from ctxguard import ContextBudget, DropOldestTurns, SummarizeOldTurns
from ctxguard.integrations.agentlightning_v1 import Gateway, guarded_client, guarded_run


def task() -> dict[str, Any]:
    return json.loads(os.environ["TASK"])


def talk(client: Any, *, words: int = 10, turns: int = 1, max_tokens: int = 4, **_: Any) -> list[str]:
    """A conversation that grows by so many words a turn; what was answered."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are brief."}]
    answers = []
    for _ in range(turns):
        text = " ".join(["word"] * words)
        messages.append({"role": "user", "content": text})
        answer = client.chat.completions.create(
            model="auto", messages=messages, max_tokens=max_tokens, temperature=0.0
        )
        content = answer.choices[0].message.content or ""
        answers.append(content)
        messages.append({"role": "assistant", "content": content})
    return answers


def attempt(client: Any, **options: Any) -> float | None:
    """The conversation, and its reward."""
    try:
        talk(client, **options)
    except openai.BadRequestError:
        if options.get("on_refusal", "raise") == "raise":
            raise
        return options.get("reward_if_swallowed")
    return options.get("reward", 1.0)


def plain_client() -> openai.OpenAI:
    gateway = Gateway.from_environment()
    return openai.OpenAI(base_url=gateway.openai_url, api_key=gateway.key, max_retries=0)


class ByTask:
    """Whichever agent the task names."""

    def run(self) -> Any:
        return globals()[task()["agent"]]().run()


class Plain:
    """An agent as Agent Lightning's examples have it: it posts its own reward."""

    def run(self) -> None:
        reward = attempt(plain_client(), **task())
        if reward is not None:
            Gateway.from_environment().post("reward", {"value": reward})


class Guarded:
    """The guard passes each prompt on and says what becomes of the rollout (``mode="observe"``)."""

    @guarded_run
    def run(self) -> float | None:
        options = task()
        client = guarded_client(options.get("window", 256), mode="observe", **COUNTER)
        return attempt(client, **options)


class Fitted:
    """The guard fits each prompt; async, and posting its reward itself."""

    @guarded_run
    async def run(self) -> None:
        options = task()
        client = guarded_client(
            options.get("window"), client_class=openai.AsyncOpenAI, strategies=[DropOldestTurns()], **COUNTER
        )
        async with client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Begin."}]
            for _ in range(options.get("turns", 1)):
                text = " ".join(["word"] * options.get("words", 10))
                messages.append({"role": "user", "content": text})
                answer = await client.chat.completions.create(model="auto", messages=messages, max_tokens=4)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or "."})
        Gateway.from_environment().post("reward", {"value": options.get("reward", 1.0)})


class Summarizing:
    """The guard has a model summarise the oldest turns."""

    @guarded_run
    def run(self) -> float:
        options = task()
        budget = ContextBudget(window=options["window"], max_response_tokens=16)
        strategies = [
            SummarizeOldTurns(keep_last_turns=1, max_summary_tokens=32, max_message_tokens=32),
            DropOldestTurns(),
        ]
        talk(guarded_client(budget, strategies=strategies, **COUNTER), **options)
        return 1.0


class Crashing:
    """It breaks after its calls, with an error that is not about length."""

    @guarded_run
    def run(self) -> float:
        talk(guarded_client(256, mode="observe", **COUNTER), **task())
        raise LookupError("the tool went away")


class Idle:
    """It calls no model."""

    @guarded_run
    def run(self) -> float:
        return 1.0


class Exiting:
    """It ends its own process."""

    @guarded_run(require_calls=False)
    def run(self) -> float:
        raise SystemExit(3)


class Sleeping:
    """It does not come back."""

    def run(self) -> None:
        time.sleep(600)


class Quick:
    """It calls no model and ends in an instant, well or not."""

    def run(self) -> None:
        time.sleep(task().get("seconds", 0))
        if task().get("reward") is None:
            raise LookupError("no luck")
        Gateway.from_environment().post("reward", {"value": task()["reward"]})


COUNTER = {"tokenizer": os.environ["TOKENIZER"]}
