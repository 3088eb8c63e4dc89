"""Messages and tool schemas as vLLM hands them to the chat template.

What a client sends is not what the template sees. vLLM 0.32 (``renderers/chat_utils.py``,
``entrypoints/openai/chat_completion/protocol.py``) rebuilds each message first, and a template given the raw
message counts wrong or raises. The rules, recorded from vLLM itself in ``tests/tokens/data``:

- ``content`` None or missing is ``""``; text parts are joined by a newline, whatever kind of text they are
  (text, refusal, thinking); for templates that iterate over parts (format ``"openai"``) they stay a list.
- ``reasoning_content`` and ``reasoning`` of an assistant become both, the latter winning.
- ``tool_calls[].function.arguments`` is parsed; empty, malformed and non-object JSON is ``{}``;
  an empty ``tool_calls`` is left out.
- only role, content, reasoning, tool_calls, tool_call_id (role tool), name and task get through.
- a ``developer`` message becomes ``system`` where the template does not know that role, and then all system
  messages are merged into the first.
- a tool keeps type, name, description, parameters (the latter two null when absent) and ``strict``.

A dialect for llama.cpp, which differs in most of these, is in `ctxguard.tokens.llama_cpp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ctxguard.tokens.media import media_kind

ContentFormat = Literal["string", "openai"]
"""How a template takes contents: as one string, or as a list of parts."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_TOOL_FIELDS = ("name", "description", "parameters", "strict", "defer_loading")
_BILLING_HEADER = "x-anthropic-billing-header"


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    content_format: ContentFormat = "string",
    knows_developer: bool = False,
) -> list[dict[str, Any]]:
    """The messages as vLLM's chat template sees them; the caller's are not touched.

    Args:
        messages: OpenAI chat messages (mappings).
        content_format: what vLLM detects for the template, see `ChatTemplate.content_format`.
        knows_developer: whether the template knows the role ``developer``.
    """
    normalized = [_message(message, content_format) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in normalized):
        normalized = _merge_system(normalized)
    return normalized


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tool schemas as vLLM's chat template sees them, or None where there are none."""
    return [_tool(tool) for tool in tools] if tools else None


def _message(message: Mapping[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = message.get("role", "")
    normalized: dict[str, Any] = {"role": role, "content": _content(message, role, content_format)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            normalized["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            normalized["reasoning"] = normalized["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        normalized["tool_call_id"] = message["tool_call_id"]
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            normalized[field] = message[field]
    if role == "developer":
        normalized["tools"] = message.get("tools")
    return normalized


def _content(message: Mapping[str, Any], role: str, content_format: ContentFormat) -> Any:
    content = message.get("content")
    parts: Sequence[Any]
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    else:
        parts = content
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing_header(part)) is not None]
    if content_format == "string":
        return "\n".join(text for part in parts if (text := _part_text(part)) is not None)
    rendered = [entry for part in parts if (entry := _part_entry(part)) is not None]
    if role == "tool" and all(entry["type"] == "text" for entry in rendered):
        # Most templates take only a string here, so vLLM makes one of text whatever the format.
        return "\n".join(entry["text"] for entry in rendered)
    return rendered


def _part_text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
    if kind == "tool_reference":
        text = part.get("name")
    return text if isinstance(text, str) else None


def _part_entry(part: Any) -> dict[str, Any] | None:
    text = _part_text(part)
    if text is not None:
        if not isinstance(part, str) and part.get("type") == "tool_reference":
            return {"type": "tool_reference", "name": text}
        return {"type": "text", "text": text, **_extra_fields(part)}
    kind = media_kind(part)
    return None if kind is None else {"type": kind}


def _extra_fields(part: Any) -> dict[str, Any]:
    """What vLLM keeps of a text part besides its text: any field that it does not know."""
    if isinstance(part, str):
        return {}
    return {key: value for key, value in part.items() if key not in _KNOWN_PART_FIELDS}


_KNOWN_PART_FIELDS = frozenset({
    "type", "text", "refusal", "thinking", "closed", "name", "uuid", "file", "data",
    "prompt_cache_breakpoint", "image_url", "image_embeds", "image_pil", "audio_url", "audio_embeds",
    "input_audio", "video_url", "video_embeds",
})  # fmt: skip


def _without_billing_header(part: Any) -> Any:
    """vLLM drops Claude Code's changing header line from system text; None where nothing is left."""
    text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
    if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _call(call: Any) -> Any:
    """A tool call with parsed arguments, its keys in the order in which vLLM's validation leaves them."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    parsed = {
        **_ordered(function, ("arguments", "name")),
        "arguments": parsed_arguments(function.get("arguments")),
    }
    return {**_ordered(call, ("id", "function", "type")), "function": parsed}


def parsed_arguments(arguments: Any) -> dict[str, Any]:
    """Tool call arguments as an object; ``{}`` for whatever is none (as vLLM does, to keep going)."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {}


def _ordered(mapping: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    ordered = {key: mapping[key] for key in first if key in mapping}
    ordered.update((key, value) for key, value in mapping.items() if key not in ordered)
    return ordered


def _merge_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    converted = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [i for i, message in enumerate(converted) if message["role"] == "system"]
    if system == [0]:
        return converted
    texts = (_flat(converted[i]["content"]) for i in system)
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    fields = {field: function.get(field) for field in _TOOL_FIELDS}
    deferred = tool.get("defer_loading")
    if fields["defer_loading"] is None:
        fields["defer_loading"] = deferred
    for optional in ("strict", "defer_loading"):
        if fields[optional] is None:
            del fields[optional]
    normalized: dict[str, Any] = {"type": tool.get("type", "function"), "function": fields}
    if deferred is not None:
        normalized["defer_loading"] = deferred
    return normalized
