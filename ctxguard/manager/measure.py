"""Sizes of prompts, for one call: the true count, and the count that decisions are made on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ctxguard.errors import TemplateRefusedError
from ctxguard.messages import Message, lead_length, part_texts, reasoning_of, tool_calls_of
from ctxguard.messages.content import call_arguments, call_name
from ctxguard.tokens.base import TokenCounter, Tool
from ctxguard.tokens.media import media_tokens

LEAD_STEP = 64
MESSAGE_OVERHEAD = 16


class Measure:
    """Counts prompts with one set of tools and template options; remembers what it counted.

    Decisions are made on a count in which the leading system message enters rounded *down* to
    ``LEAD_STEP`` tokens: a clock in the system prompt then changes no decision, and never makes one
    earlier than the true count would.
    """

    def __init__(
        self,
        counter: TokenCounter,
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, Any] | None,
        messages: Sequence[Message],
    ) -> None:
        self._counter = counter
        self._tools = tools
        self._template_kwargs = template_kwargs
        self._known: dict[tuple[int, ...], tuple[int, bool]] = {}
        self._alive: list[Sequence[Message]] = []  # keeps the ids in the keys of _known valid
        self._costs: dict[int, tuple[Message, int]] = {}
        self.lead = list(messages[: lead_length(messages)])
        task = next((m for m in messages if m.get("role") == "user"), None)
        self._head = [*self.lead, task] if task is not None else self.lead
        lead_tokens = self._lead_tokens()
        self.lead_step = lead_tokens // LEAD_STEP * LEAD_STEP
        self._correction = self.lead_step - lead_tokens

    def _lead_tokens(self) -> int:
        if not self.lead:
            return 0
        empty = [{**message, "content": ""} for message in self.lead] + self._head[len(self.lead) :]
        full, refused = self._count(self._head)
        bare, bare_refused = self._count(empty)
        return 0 if refused or bare_refused else max(0, full - bare)

    def tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the whole prompt."""
        return self._count(messages)[0]

    def decision(self, messages: Sequence[Message]) -> int:
        """Tokens of the whole prompt with the lead rounded down: what decisions are made on."""
        return self._count(messages)[0] + self._correction

    def is_refused(self, messages: Sequence[Message]) -> bool:
        """Whether the chat template refuses these messages (their count is an estimate then)."""
        return self._count(messages)[1]

    @property
    def head(self) -> int:
        """Tokens of system message, tools and first task: what no default strategy makes smaller."""
        return self.decision(self._head) if self._head else self.tools_tokens()

    def _count(self, messages: Sequence[Message]) -> tuple[int, bool]:
        key = tuple(map(id, messages))
        found = self._known.get(key)
        if found is None:
            try:
                found = (
                    self._counter.count(messages, tools=self._tools, template_kwargs=self._template_kwargs),
                    False,
                )
            except TemplateRefusedError:
                found = (self.tools_tokens() + sum(map(self.cost, messages)), True)
            self._known[key] = found
            self._alive.append(messages)
        return found

    def cost(self, message: Message) -> int:
        """Tokens of one message by itself, rounded up: texts, reasoning, calls, and an overhead."""
        found = self._costs.get(id(message))
        if found is None:
            found = self._costs[id(message)] = (message, self._message_cost(message))
        return found[1]

    def _message_cost(self, message: Message) -> int:
        count = self._counter.count_text
        total = MESSAGE_OVERHEAD + count(reasoning_of(message)) + media_tokens([message])
        total += sum(count(text) for text in part_texts(message) if text is not None)
        for call in tool_calls_of(message):
            arguments = call_arguments(call)
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
            total += MESSAGE_OVERHEAD + count(call_name(call)) + count(text)
        return total

    def tools_tokens(self) -> int:
        """Tokens of the tool schemas as JSON: what they cost, near enough to explain an error."""
        return sum(tokens for _, tokens in self.tool_sizes())

    def tool_sizes(self) -> list[tuple[str, int]]:
        """``(tool name, tokens of its schema as JSON)``, largest first."""
        sizes = []
        for tool in self._tools or ():
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
            text = json.dumps(tool, ensure_ascii=False, default=str)
            sizes.append((str(name or "?"), self._counter.count_text(text)))
        return sorted(sizes, key=lambda item: -item[1])
