"""Recipes: what a compaction did, as instructions that can be applied to the caller's own messages.

A recipe holds no copies of messages. Kept messages are therefore the caller's bytes of *this* call,
ids stay paired, and two rollouts with the same beginning can share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxguard.messages import Message, Turn, flatten_turns, part_texts, with_part_texts


@dataclass(frozen=True)
class Edit:
    """How one message was changed.

    Attributes:
        texts: new text per content part.
        arguments: new arguments (a JSON string) per tool call.
        removed: fields that were taken out, e.g. ``reasoning_content``.
        fields: fields that were replaced as a whole (only custom strategies do so).
    """

    texts: tuple[tuple[int, str], ...] = ()
    arguments: tuple[tuple[int, str], ...] = ()
    removed: frozenset[str] = frozenset()
    fields: tuple[tuple[str, Any], ...] = ()

    def apply(self, message: Message) -> dict[str, Any]:
        """The message with this edit; everything else is the message's own."""
        edited = {key: value for key, value in message.items() if key not in self.removed}
        if self.texts:
            edited = with_part_texts(edited, dict(self.texts))
        if self.arguments:
            edited["tool_calls"] = _with_arguments(edited.get("tool_calls") or [], dict(self.arguments))
        edited.update(self.fields)
        return edited

    @classmethod
    def between(cls, before: Message, after: Message) -> Edit | None:
        """The edit that turns one message into another, None where they are equal."""
        if before is after or before == after:
            return None
        removed = frozenset(key for key in before if key not in after)
        fields: dict[str, Any] = {}
        texts: tuple[tuple[int, str], ...] = ()
        arguments: tuple[tuple[int, str], ...] = ()
        for key, value in after.items():
            if before.get(key) is value or (key in before and before[key] == value):
                continue
            if key == "content" and (found := _changed_texts(before, after)) is not None:
                texts = found
            elif key == "tool_calls" and (changed := _changed_arguments(before.get(key), value)) is not None:
                arguments = changed
            else:
                fields[key] = value
        return cls(texts, arguments, removed, tuple(fields.items()))


def _changed_texts(before: Message, after: Message) -> tuple[tuple[int, str], ...] | None:
    old, new = part_texts(before), part_texts(after)
    content = after.get("content")
    if len(old) != len(new) or type(before.get("content")) is not type(content):
        return None
    changed = tuple((i, text) for i, text in enumerate(new) if text is not None and text != old[i])
    return changed if with_part_texts(before, dict(changed))["content"] == content else None


def _changed_arguments(before: Any, after: Any) -> tuple[tuple[int, str], ...] | None:
    if not isinstance(before, Sequence) or not isinstance(after, Sequence) or len(before) != len(after):
        return None
    changed = tuple(
        (i, new["function"]["arguments"])
        for i, (old, new) in enumerate(zip(before, after, strict=True))
        if old != new and isinstance(new.get("function"), Mapping) and "arguments" in new["function"]
    )
    return changed if _with_arguments(before, dict(changed)) == list(after) else None


def _with_arguments(calls: Sequence[Any], arguments: Mapping[int, str]) -> list[Any]:
    return [
        {**call, "function": {**call["function"], "arguments": arguments[i]}} if i in arguments else call
        for i, call in enumerate(calls)
    ]


@dataclass(frozen=True)
class Insert:
    """A message that compaction put in (only custom strategies do so)."""

    message: Message


Step = int | tuple[int, Edit] | Insert
"""Keep message ``i`` | keep message ``i`` edited | insert a message. What is not named is dropped."""


@dataclass(frozen=True)
class Recipe:
    """What a history of at least ``covers`` messages was compacted to.

    Attributes:
        covers: number of messages it speaks about: up to the last one that was altered.
        steps: what becomes of them. Messages behind ``covers`` are kept as they are.
    """

    covers: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def dropped(self) -> int:
        """How many of the caller's messages it leaves out."""
        return self.covers - sum(not isinstance(step, Insert) for step in self.steps)

    @property
    def altered(self) -> int:
        """How many messages it shortens."""
        return sum(isinstance(step, tuple) for step in self.steps)

    def apply(self, messages: Sequence[Message]) -> tuple[list[Message], list[int | None]]:
        """The compacted view of a history that begins with what the recipe was made for.

        Returns the messages and, for each, its position in ``messages`` (None for an inserted one).
        """
        view: list[Message] = []
        origins: list[int | None] = []
        for step in self.steps:
            if isinstance(step, Insert):
                view.append(step.message)
                origins.append(None)
            elif isinstance(step, tuple):
                view.append(step[1].apply(messages[step[0]]))
                origins.append(step[0])
            else:
                view.append(messages[step])
                origins.append(step)
        view += messages[self.covers :]
        origins += range(self.covers, len(messages))
        return view, origins

    @classmethod
    def of(cls, turns: Sequence[Turn], messages: Sequence[Message]) -> Recipe:
        """The recipe that makes these turns out of the caller's messages."""
        steps: list[Step] = []
        origins = [origin for turn in turns for origin in turn.origins]
        for message, origin in zip(flatten_turns(turns), origins, strict=True):
            if origin is None:
                steps.append(Insert(message))
                continue
            edit = Edit.between(messages[origin], message)
            steps.append(origin if edit is None else (origin, edit))
        covers = len(messages)
        while steps and covers > 0 and steps[-1] == covers - 1:
            steps.pop()
            covers -= 1
        return cls(covers, tuple(steps))


UNTOUCHED = Recipe()
"""The recipe that keeps everything."""
