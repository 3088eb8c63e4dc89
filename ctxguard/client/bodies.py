"""Reading a body, whatever its form, as the events of an answer or as the text of an error.

Bounded: a huge body is looked at by its head and tail only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

HEAD_CHARS = 4096
TAIL_CHARS = 4096
MAX_EVENTS = 64
# Longer JSON texts are not parsed but read as head + tail.
_MAX_JSON_CHARS = 1 << 17
_MAX_NODES = 400
_MAX_DEPTH = 12

# A body may quote the request (FastAPI's 422 does); an agent's history can say "prompt is too long" itself.
_ECHO_KEYS = frozenset(
    {"input", "messages", "prompt", "tools", "content", "choices", "output", "request", "ctx"}
)
_ANSWER_KEYS = (
    "choices",
    "usage",
    "stop_reason",
    "finish_reason",
    "done_reason",
    "prompt_eval_count",
    "incomplete_details",
    "delta",
)


def read_body(body: object) -> tuple[list[Mapping[str, Any]], str]:
    """Split a body into the events of an answer (empty for an error) and the text of an error."""
    if isinstance(body, (bytes, bytearray)):
        body = body.decode("utf-8", "replace")
    if isinstance(body, str):
        stripped = body[:256].lstrip()
        if stripped.startswith(("data:", "event:")):
            events = _sse_events(body)
            if not events:
                return [], _without_answer(body)
            wrong = [event for event in events if _is_error(event)]
            if wrong or not any(map(_is_answer, events)):
                return [], _flatten(wrong or events)
            return events, ""
        if not stripped.startswith(("{", "[")):
            return [], body
        if len(body) > _MAX_JSON_CHARS:
            return [], _without_answer(body)
        parsed = _load(body)
        if parsed is None:
            return [], body
        body = parsed
    if isinstance(body, Mapping) and _is_answer(body):
        return [body], ""
    return [], _flatten(body)


def _without_answer(text: str) -> str:
    """``text`` that cannot be parsed, unless it is an answer: its words would be the model's own."""
    return "" if '"choices"' in text[:HEAD_CHARS] else text


def _load(text: str) -> Mapping[str, Any] | list[Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def head_and_tail(text: str) -> str:
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return text[:HEAD_CHARS] + " \u2026 " + text[-TAIL_CHARS:]


def _sse_events(text: str) -> list[Mapping[str, Any]]:
    """The JSON objects of a stream's ``data:`` lines; of a long stream the first and the last ones."""
    if len(text) > 2 * _MAX_JSON_CHARS:
        text = text[:_MAX_JSON_CHARS] + "\n" + text[-_MAX_JSON_CHARS:]
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    if len(lines) > MAX_EVENTS:
        lines = lines[: MAX_EVENTS // 2] + lines[-MAX_EVENTS // 2 :]
    return [event for event in map(_load, lines) if isinstance(event, Mapping)]


def _is_error(body: Mapping[str, Any]) -> bool:
    if body.get("error") or body.get("errors") or body.get("type") in ("error", "response.failed"):
        return True
    base = body.get("base_resp")
    if isinstance(base, Mapping) and base.get("status_code"):
        return True
    choice = first_mapping(body.get("choices"))
    return bool(choice.get("error"))


def _is_answer(body: Mapping[str, Any]) -> bool:
    return not _is_error(body) and any(body.get(key) is not None for key in _ANSWER_KEYS)


def first_mapping(items: object) -> Mapping[str, Any]:
    if isinstance(items, list) and items and isinstance(items[0], Mapping):
        return items[0]
    return {}


def _flatten(body: object) -> str:
    """The body's strings and numbers as ``key: value; …``, without what it quotes of the request."""
    pieces: list[str] = []
    room = HEAD_CHARS + TAIL_CHARS
    for piece in _pieces(body, depth=0):
        pieces.append(head_and_tail(piece))
        room -= len(pieces[-1])
        if room < 0 or len(pieces) > _MAX_NODES:
            break
    return "; ".join(pieces)


def _pieces(value: object, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key == "choices":
                # OpenRouter puts the error of a 200 there; the rest is the model's own text
                yield from _pieces(first_mapping(item).get("error"), depth + 1)
            if key in _ECHO_KEYS:
                continue
            if isinstance(item, (Mapping, list, tuple)):
                # "loc: body, max_tokens" reads better than the path cut in two
                first = True
                for piece in _pieces(item, depth + 1):
                    yield f"{key}: {piece}" if first else piece
                    first = False
            elif isinstance(item, (str, float)) or (isinstance(item, int) and abs(item) < 10**12):
                yield f"{key}: {item}"
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, str) for item in value):
            yield ", ".join(value[:_MAX_NODES])
        else:
            for item in value[:_MAX_NODES]:
                yield from _pieces(item, depth + 1)
