"""Reading and rewriting message contents, whatever shape they come in.

A content may be None, ``""``, a string, or a list of parts (text, refusal, image_url, input_audio,
file). For all of them there is one view: a list of parts, of which the text-bearing ones can be
read and replaced. A plain string is one text part; None and ``""`` are no part at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctxguard.errors import InvalidMessagesError

Message = Mapping[str, Any]
"""One chat message in OpenAI form: ``{"role": …, "content": …, …}``."""

_TEXT_KEYS = ("text", "refusal")
_REASONING_KEYS = ("reasoning_content", "reasoning")


def as_messages(messages: Any) -> list[dict[str, Any]]:
    """The caller's messages as a list of plain dicts, in order.

    Dicts come back as the very same objects (ctxguard never mutates them); other mappings are
    shallow-copied; pydantic message objects (e.g. an answer's ``message`` appended as it is) are
    dumped as the OpenAI SDK would dump them.

    Raises:
        InvalidMessagesError: not a list or tuple, or an element without a string ``role``.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidMessagesError(
            f"messages must be a list of mappings with a 'role', got {type(messages).__name__}; "
            "pass e.g. [{'role': 'user', 'content': '…'}]",
            index=None,
        )
    return [_as_message(message, index) for index, message in enumerate(messages)]


def _as_message(message: Any, index: int) -> dict[str, Any]:
    dump = getattr(message, "model_dump", None)
    if isinstance(message, dict):
        plain = message
    elif isinstance(message, Mapping):
        plain = dict(message)
    elif callable(dump):
        plain = dump(mode="json", exclude_unset=True)
    else:
        raise InvalidMessagesError(
            f"messages[{index}] is a {type(message).__name__}, not a mapping with a 'role'", index=index
        )
    role = plain.get("role")
    if not isinstance(role, str):
        raise InvalidMessagesError(f"messages[{index}] has no string 'role': {role!r:.40}", index=index)
    content = plain.get("content")
    if not (content is None or isinstance(content, str) or _is_part_list(content)):
        raise InvalidMessagesError(
            f"messages[{index}]['content'] must be None, a string or a list of parts, "
            f"got {type(content).__name__}",
            index=index,
        )
    return plain


def _is_part_list(content: Any) -> bool:
    return isinstance(content, list | tuple) and all(isinstance(part, str | Mapping) for part in content)


def part_texts(message: Message) -> list[str | None]:
    """One entry a content part: its text, or None where the part is not text (image, audio, file)."""
    content = message.get("content")
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, str) else _part_text(part) for part in content]


def _part_text(part: Mapping[str, Any]) -> str | None:
    for key in _TEXT_KEYS:
        text = part.get(key)
        if isinstance(text, str):
            return text
    return None


def text_of(message: Message) -> str:
    """All text of the content, parts joined by a newline (as vLLM joins them)."""
    return "\n".join(text for text in part_texts(message) if text is not None)


def with_part_texts(message: Message, texts: Mapping[int, str]) -> dict[str, Any]:
    """A copy of the message in which part ``i`` carries ``texts[i]``; all else is the same object.

    A non-text part that is given a text becomes a text part.
    """
    content = message.get("content")
    new: Any
    if isinstance(content, list | tuple):
        new = [_with_text(part, texts[i]) if i in texts else part for i, part in enumerate(content)]
    else:
        new = texts.get(0, content)
    return {**message, "content": new}


def _with_text(part: Any, text: str) -> Any:
    if isinstance(part, str):
        return text
    for key in _TEXT_KEYS:
        if isinstance(part.get(key), str):
            return {**part, key: text}
    return {"type": "text", "text": text}


def reasoning_of(message: Message) -> str:
    """The separate reasoning text (``reasoning_content`` or ``reasoning``), or ``""``."""
    for key in _REASONING_KEYS:
        value = message.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def without_reasoning(message: Message) -> dict[str, Any]:
    """A copy of the message without its separate reasoning text."""
    return {key: value for key, value in message.items() if key not in _REASONING_KEYS}


def tool_calls_of(message: Message) -> list[Mapping[str, Any]]:
    """The native tool calls of an assistant message (``function_call`` of old included)."""
    if message.get("role") != "assistant":
        return []
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple) and calls:
        return [call for call in calls if isinstance(call, Mapping)]
    legacy = message.get("function_call")
    return [{"type": "function", "function": legacy}] if isinstance(legacy, Mapping) else []


def call_name(call: Mapping[str, Any]) -> str:
    """The name of the function that a tool call asks for, or ``""``."""
    function = call.get("function") or call.get("custom")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def call_arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a tool call as they stand: usually a JSON string."""
    function = call.get("function") or call.get("custom")
    if not isinstance(function, Mapping):
        return None
    return function.get("arguments", function.get("input"))
