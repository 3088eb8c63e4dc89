"""Agents on a real vLLM whose calls a trainer merges into rows: their token ids, for tests of more than one trainer.

The tiny model's text is noise. What the scenarios need of it (words that are tokenized again as they were
written, thinking, tool calls) is had by bounding what it may sample, so it is generated all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from ctxguard import ChatTemplateCounter, ContextBudget, ContextOverflowError, Guard
from ctxguard.events import Compacted
from ctxguard.integrations.trajectories import split_into_segments
from ctxguard.scope import open_scope

MODEL = "tiny-qwen3"
FIRST, BEHIND = 600, 700
"""What the trainer pads rows to: first prompt, and everything behind it."""
MAX_TOKENS = 24
WORDS = ("the", "of", "and", "to", "in", "is", "on", "by", "it", "or")
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
Turn = tuple[list[int], list[int]]


class Vocabulary:
    """Token ids of texts, to bound what the model samples."""

    def __init__(self, counter: ChatTemplateCounter) -> None:
        self._ids = counter._text.ids
        self.words = [token for word in WORDS for token in self._ids(f" {word}")]

    def bounded_to(self, *texts: str, regex: str | None = None, prefer: str | None = None) -> dict[str, Any]:
        """Request fields: only tokens of these texts, in this form."""
        body: dict[str, Any] = {
            "allowed_token_ids": sorted({token for text in texts for token in self._ids(text)})
        }
        if regex is not None:
            body["structured_outputs"] = {"regex": regex}
            body["allowed_token_ids"] += self._ids("<|im_end|>")
        if prefer is not None:
            body["logit_bias"] = {str(token): 50 for token in self._ids(prefer)}
        return body


@dataclass(frozen=True)
class Scenario:
    """An agent's habits.

    Attributes:
        sampling: what bounds the model's text.
        observation: from the number of a turn and a text to the message that answers the model's.
        tools: whether the tool schema goes with each call, and the model calls it natively.
        repeats: whether each call is made twice, the answer being the same.
    """

    name: str
    sampling: Callable[[Vocabulary], dict[str, Any]]
    observation: Callable[[int, str], dict[str, Any]]
    tools: bool = False
    repeats: bool = False
    turns: int = 14


def _words(vocabulary: Vocabulary) -> dict[str, Any]:
    return vocabulary.bounded_to(*(f" {word}" for word in WORDS))


def _thinking(vocabulary: Vocabulary) -> dict[str, Any]:
    word = f"({'|'.join(f' {word}' for word in WORDS)})"
    form = rf"<think>\n{word}{{3,6}}\n</think>\n\n{word}{{2,6}}"
    texts = ["<think>", "</think>", "\n", "\n\n", *(f" {word}" for word in WORDS)]
    return vocabulary.bounded_to(*texts, regex=form, prefer="\n\n")


def _calling(vocabulary: Vocabulary) -> dict[str, Any]:
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "%s"}}\n</tool_call>'
    paths = ["src", "lib"]
    form = re.escape(call).replace("%s", f"({'|'.join(paths)})")
    return vocabulary.bounded_to(*(call % path for path in paths), regex=form)


def _anything(vocabulary: Vocabulary) -> dict[str, Any]:
    return {}


def _as_tool_response(number: int, text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


def _as_user(number: int, text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _as_either(number: int, text: str) -> dict[str, Any]:
    return _as_user(number, text) if number % 5 == 4 else _as_tool_response(number, text)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("words", _words, _as_tool_response),
        Scenario("native calls", _calling, _as_tool_response, tools=True),
        Scenario("thinking that stays in the prompt", _thinking, _as_tool_response),
        Scenario("thinking that the template strips", _thinking, _as_user),
        Scenario("thinking stripped now and then", _thinking, _as_either, turns=18),
        Scenario("text that is tokenized otherwise than written", _anything, _as_tool_response),
        Scenario("repeated calls and answers", _words, _as_tool_response, repeats=True, turns=10),
    )
}


@dataclass
class Rollout:
    """What an agent did: its calls as the trainer gets them, and where it ended."""

    turns: list[Turn] = field(default_factory=list)
    compactions: int = 0
    conditional: str = ""
    ended_by: Exception | None = None

    @property
    def rows(self) -> list[list[Turn]]:
        return [[self.turns[index] for index in row] for row in split_into_segments(self.turns)]


def row_budget(window: int) -> ContextBudget:
    return ContextBudget(
        window=window, max_prompt_tokens=FIRST, max_response_tokens=BEHIND, level="trajectory"
    )


def run(
    scenario: Scenario, base_url: str, counter: ChatTemplateCounter, budget: ContextBudget | None
) -> Rollout:
    """Let the agent work, guarded by a budget or, without one, as it is; it ends at the first refusal."""
    rollout = Rollout()
    client = openai.OpenAI(base_url=base_url, api_key="k", max_retries=0)
    extra = {**scenario.sampling(Vocabulary(counter)), "seed": 7}
    if budget is None or budget.level == "call":
        # Agent Lightning's proxy adds it; at level "trajectory" the guard does so itself.
        extra["return_token_ids"] = True
    with client, open_scope("r") as scope:
        agents = client if budget is None else Guard(budget, counter=counter).wrap(client)
        _converse(scenario, agents, extra, rollout)
    rollout.compactions = sum(isinstance(event, Compacted) for event in scope.events)
    rollout.conditional = scope.segments.conditional
    return rollout


def _converse(scenario: Scenario, client: Any, extra: Mapping[str, Any], rollout: Rollout) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "You find bugs."},
        {"role": "user", "content": "Find the bug in the service and say what it is."},
    ]
    options: dict[str, Any] = {"tools": [TOOL]} if scenario.tools else {}
    for number in range(scenario.turns):
        for _ in range(1 + scenario.repeats):
            try:
                answer = client.chat.completions.create(
                    model=MODEL,
                    messages=messages,
                    max_tokens=48 if scenario.tools else MAX_TOKENS,
                    temperature=0 if scenario.repeats else 1,
                    extra_body=extra,
                    **options,
                )
            except (openai.BadRequestError, ContextOverflowError) as error:
                rollout.ended_by = error
                return
            choice = answer.choices[0]
            rollout.turns.append((list(answer.prompt_token_ids), list(choice.token_ids)))
        messages.append(choice.message.model_dump(exclude_none=True))
        text = "\n".join(f"{line}: value_{number}_{line} = {line}" for line in range(2 + 2 * (number % 8)))
        if choice.message.tool_calls:
            call_id = choice.message.tool_calls[0].id
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            messages.append(scenario.observation(number, text))


@dataclass(frozen=True)
class Row:
    """A row of a trainer's batch, padding taken off."""

    prompt: list[int]
    response: list[int]
    trained: list[int]
    dropped: bool


def rows_of(batch: Any, *, first: int) -> list[Row]:
    """The rows of a verl batch whose prompts are padded to ``first`` tokens."""
    rows = []
    for index in range(len(batch)):
        part = {name: values[index].tolist() for name, values in batch.batch.items()}
        there = part["attention_mask"]
        response = [token for token, real in zip(part["responses"], there[first:], strict=True) if real]
        mask = part.get("response_mask") or there[first:]
        rows.append(
            Row(
                [token for token, real in zip(part["prompts"], there[:first], strict=True) if real],
                response,
                [token for token, trained in zip(part["responses"], mask, strict=True) if trained],
                bool(part["is_drop_mask"]),
            )
        )
    return rows


def expected(row: Sequence[Turn]) -> Row:
    """What a row must be that holds these calls: nothing cut, the generated ids trained on, no others."""
    first, last = row[0], row[-1]
    whole = [*last[0], *last[1]]
    return Row(first[0], whole[len(first[0]) :], [token for _, ids in row for token in ids], dropped=False)
