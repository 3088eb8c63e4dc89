"""Turns: the unit that compaction works on, so that a call is never parted from its results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ctxguard.messages.content import (
    Message,
    call_name,
    part_texts,
    tool_calls_of,
    with_part_texts,
)
from ctxguard.messages.dialects import HERMES, call_dialect, result_dialect

TurnKind = Literal["system", "user", "assistant", "result"]
SpanKind = Literal["result", "prose"]

SYSTEM_ROLES = frozenset({"system", "developer"})
RESULT_ROLES = frozenset({"tool", "function"})


@dataclass(frozen=True)
class TextSpan:
    """A piece of text that a strategy may shorten without touching what surrounds it.

    Attributes:
        message: position of the message in its turn.
        part: position of the content part in the message.
        start, end: offsets of the piece in the part's text, in characters.
        kind: ``"result"`` for what a tool answered, ``"prose"`` for all other text.
        tool: name of the tool that answered, where it is known, else ``""``.
        text: the piece itself.
    """

    message: int
    part: int
    start: int
    end: int
    kind: SpanKind
    tool: str
    text: str


@dataclass(frozen=True)
class Turn:
    """An assistant message with its tool calls and every result; or one message of another role.

    Attributes:
        kind: ``"system"``, ``"user"``, ``"assistant"``, or ``"result"`` for a result without a call.
        messages: the messages, in order.
        origins: for each message its position in the caller's list, None for one that was inserted.
        pinned: must stay as it is (system message, task, what the user pinned).
        newest: must stay; may be shortened when nothing else is left.
    """

    kind: TurnKind
    messages: tuple[Message, ...]
    origins: tuple[int | None, ...]
    pinned: bool = False
    newest: bool = False

    @cached_property
    def spans(self) -> tuple[TextSpan, ...]:
        """The pieces of text that may be shortened, in order."""
        return tuple(_spans_of(self))

    @cached_property
    def tool_names(self) -> tuple[str, ...]:
        """Names of the tools called in this turn, native and in text form."""
        names: list[str] = []
        for message in self.messages:
            if message.get("role") == "assistant":
                names += _called_names(message)
        return tuple(names)

    def with_texts(self, texts: Mapping[TextSpan, str]) -> Turn:
        """This turn with the given spans replaced; what lies outside a span stays byte for byte."""
        messages = list(self.messages)
        edits: dict[tuple[int, int], list[TextSpan]] = {}
        for span in texts:
            edits.setdefault((span.message, span.part), []).append(span)
        for (position, part), spans in edits.items():
            text = part_texts(messages[position])[part] or ""
            for span in sorted(spans, key=lambda span: span.start, reverse=True):
                text = text[: span.start] + texts[span] + text[span.end :]
            messages[position] = with_part_texts(messages[position], {part: text})
        return replace(self, messages=tuple(messages))

    def with_message(self, position: int, message: Message) -> Turn:
        """This turn with one message replaced; its origin stays."""
        messages = (*self.messages[:position], message, *self.messages[position + 1 :])
        return replace(self, messages=messages)


def group_turns(messages: Sequence[Message], origins: Sequence[int | None] | None = None) -> list[Turn]:
    """Group messages into turns. ``flatten_turns(group_turns(m))`` is ``list(m)``, object for object.

    A result belongs to the newest unanswered call with its id; where other messages stand between a
    call and its late result, all of them belong to that turn. A result without a call is a turn of
    its own (kind ``"result"``).
    """
    if origins is None:
        origins = range(len(messages))
    groups: list[tuple[TurnKind, list[int]]] = []
    open_calls: list[tuple[str, int]] = []  # (call id, group), oldest first
    for index, message in enumerate(messages):
        role = message.get("role")
        if role in SYSTEM_ROLES:
            groups.append(("system", [index]))
        elif role == "assistant":
            groups.append(("assistant", [index]))
            open_calls += [(_call_id(call), len(groups) - 1) for call in tool_calls_of(message)]
        elif role in RESULT_ROLES:
            owner = _claim(open_calls, message)
            if owner is None:
                groups.append(("result", [index]))
            else:
                _absorb(groups, open_calls, owner, index)
        elif groups and groups[-1][0] == "assistant" and is_text_result(message):
            groups[-1][1].append(index)
        else:
            groups.append(("user", [index]))
    return [
        Turn(kind, tuple(messages[i] for i in members), tuple(origins[i] for i in members))
        for kind, members in groups
    ]


def _call_id(call: Mapping[str, Any]) -> str:
    # A legacy function_call has no id; its result names the function instead.
    return str(call.get("id") or call_name(call))


def _claim(open_calls: list[tuple[str, int]], result: Message) -> int | None:
    """The group whose call this result answers; the call is answered from then on."""
    wanted = str(result.get("tool_call_id") or result.get("name") or "")
    for position in range(len(open_calls) - 1, -1, -1):
        if open_calls[position][0] == wanted:
            return open_calls.pop(position)[1]
    return None


def _absorb(
    groups: list[tuple[TurnKind, list[int]]], open_calls: list[tuple[str, int]], owner: int, index: int
) -> None:
    """Add a result to its call's group, together with whatever stands between them."""
    for _, members in groups[owner + 1 :]:
        groups[owner][1].extend(members)
    del groups[owner + 1 :]
    groups[owner][1].append(index)
    open_calls[:] = [(call, min(group, owner)) for call, group in open_calls]


def is_text_result(message: Message) -> bool:
    """Whether a user message is a tool result in text form (a known dialect's tags at its start)."""
    if message.get("role") != "user":
        return False
    first = next((text for text in part_texts(message) if text is not None), "")
    return result_dialect(first) is not None


def flatten_turns(turns: Iterable[Turn]) -> list[Message]:
    """The messages of the turns, in order."""
    return [message for turn in turns for message in turn.messages]


def lead_length(messages: Sequence[Message]) -> int:
    """How many system or developer messages stand at the very start."""
    return next((i for i, m in enumerate(messages) if m.get("role") not in SYSTEM_ROLES), len(messages))


def first_task(turns: Sequence[Turn]) -> int | None:
    """Position of the turn that holds the first user message (the task), or None."""
    return next((i for i, turn in enumerate(turns) if turn.kind == "user"), None)


def newest_turn(turns: Sequence[Turn]) -> int | None:
    """Position at which the newest turn begins, or None without turns.

    A user message that stands behind tool results (a reminder, a "steps left" note) belongs to the
    newest turn together with the turn that it follows.
    """
    last = len(turns) - 1
    while last > 0 and turns[last].kind in ("user", "system") and _has_results(turns[last - 1]):
        last -= 1
    return last if last >= 0 else None


def _has_results(turn: Turn) -> bool:
    return turn.kind == "result" or len(turn.messages) > 1


def _called_names(message: Message) -> list[str]:
    native = [call_name(call) for call in tool_calls_of(message)]
    if native:
        return native
    names: list[str] = []
    for text in part_texts(message):
        dialect = call_dialect(text) if text else None
        if text and dialect:
            names += dialect.call_names(text)
    return names


def _spans_of(turn: Turn) -> Iterator[TextSpan]:
    by_id = {_call_id(call): call_name(call) for message in turn.messages for call in tool_calls_of(message)}
    text_names = iter(turn.tool_names)
    for position, message in enumerate(turn.messages):
        role = message.get("role")
        if role in RESULT_ROLES:
            name = by_id.get(str(message.get("tool_call_id") or "")) or str(message.get("name") or "")
            for part, text in enumerate(part_texts(message)):
                if text:
                    yield TextSpan(position, part, 0, len(text), "result", name, text)
        elif role == "user" and turn.kind == "assistant" and is_text_result(message):
            yield from _text_result_spans(position, message, text_names)
        else:
            for part, text in enumerate(part_texts(message)):
                end = _prose_end(role, text) if text else 0
                if text and end:
                    yield TextSpan(position, part, 0, end, "prose", "", text[:end])


def _text_result_spans(position: int, message: Message, names: Iterator[str]) -> Iterator[TextSpan]:
    for part, text in enumerate(part_texts(message)):
        dialect = result_dialect(text) if text else None
        if text is None or dialect is None:
            continue
        for start, end in dialect.result_spans(text):
            yield TextSpan(position, part, start, end, "result", next(names, ""), text[start:end])


def _prose_end(role: Any, text: str) -> int:
    """Where the text that may be shortened ends: before the first call in text form."""
    if role != "assistant":
        return len(text)
    dialect = call_dialect(text) or HERMES
    return dialect.calls_start(text)
