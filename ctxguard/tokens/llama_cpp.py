"""The dialect of llama.cpp's server: what it does differently from vLLM between request and prompt.

Each rule was seen on the running server (xllamacpp 2026.10.11549, Qwen3; ``/apply-template`` shows the
prompt, ``/v1/chat/completions/input_tokens`` the count) and is a test in ``tests/tokens``:

- no unicode normalisation before tokenising (no NFC), and words that look like an end-of-text token
  (``</s>``) are one token where the vocabulary has them, whatever the tokenizer.json says;
- a tool keeps only type, name, description (``""`` when absent) and parameters (``{}`` when absent);
- numbers are written with ``%g``: ``2.0`` is ``2``, ``3.14159265`` is ``3.14159``; integers wrap at 64 bits;
- tool call arguments are any JSON; malformed ones are refused;
- only ``reasoning_content`` is read, not ``reasoning``;
- a last assistant message is a *prefill*: the model continues it. It is written raw after the template's
  header for an assistant, behind its reasoning (or an empty one where the template writes one); empty it is
  dropped, generation prompt included; with tool calls, or after another assistant message, it is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxguard.errors import TemplateRefusedError
from ctxguard.tokens.normalize import ContentFormat, normalize_messages

# llama.cpp (src/llama-vocab.cpp) takes these for end-of-generation tokens, control tokens therefore.
_END_WORDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>", "</s>", "<eos>",
    "[EOS]", "[EOT]", "_<EOT>", "<EOT>",
)  # fmt: skip
_REASONING_MARK = "ctxguard:reasoning:here"
_CONTENT_MARK = "ctxguard:content:here"


def tokenizer_json(source: str) -> str:
    """A ``tokenizer.json`` changed to tokenise as llama.cpp does (for byte-level BPE vocabularies)."""
    rules = json.loads(source)
    rules["normalizer"] = _without_nfc(rules.get("normalizer"))
    added = rules.setdefault("added_tokens", [])
    present = {token["content"] for token in added}
    vocabulary = rules.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        added.extend(
            {
                "id": vocabulary[word],
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for word in _END_WORDS
            if word in vocabulary and word not in present
        )
        added.sort(key=lambda token: token["id"])
    return json.dumps(rules, ensure_ascii=False)


def _without_nfc(normalizer: Any) -> Any:
    if not isinstance(normalizer, dict):
        return normalizer
    if normalizer.get("type") == "NFC":
        return None
    if normalizer.get("type") == "Sequence":
        kept = [part for part in normalizer["normalizers"] if part.get("type") != "NFC"]
        return {**normalizer, "normalizers": kept} if kept else None
    return normalizer


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter, numbers as llama.cpp writes them."""
    text = json.dumps(
        _marked_numbers(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _MARKED_NUMBER.sub(r"\1", text)


_MARKED_NUMBER = re.compile('"ctxguard:number:([^"]*)"')


def _marked_numbers(value: Any) -> Any:
    """``value`` with each number that json would write differently replaced by a marked string."""
    if isinstance(value, float) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        wraps = isinstance(value, int) and 0 < value < 2**64
        return f"ctxguard:number:{value - 2**64 if wraps else format(float(value), 'g')}"
    if isinstance(value, Mapping):
        return {key: _marked_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked_numbers(item) for item in value]
    return value


def normalize_tools_llama_cpp(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tool schemas as llama.cpp's chat template sees them, or None where there are none."""
    return [_tool(tool) for tool in tools] if tools else None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    function = function if isinstance(function, Mapping) else {}
    return {
        "type": "function",
        "function": {
            "name": function.get("name"),
            "description": function.get("description", ""),
            "parameters": function.get("parameters", {}),
        },
    }


def normalize_messages_llama_cpp(
    messages: Sequence[Mapping[str, Any]],
    *,
    content_format: ContentFormat = "string",
    knows_developer: bool = False,
) -> list[dict[str, Any]]:
    """The messages as llama.cpp's chat template sees them; the caller's are not touched.

    Raises:
        TemplateRefusedError: tool call arguments that are not JSON.
    """
    return [_message(message, content_format, knows_developer) for message in messages]


def _message(
    message: Mapping[str, Any], content_format: ContentFormat, knows_developer: bool
) -> dict[str, Any]:
    own = {key: value for key, value in message.items() if key != "reasoning"}
    role = own.get("role")
    normalized = normalize_messages([own], content_format=content_format, knows_developer=True)[0]
    for field in ("reasoning", "task", "tools"):
        normalized.pop(field, None)
    if role == "developer" and not knows_developer:
        normalized["role"] = "system"
    # vLLM's reading of arguments does not hold here; take them from the original call.
    for call, raw in zip(normalized.get("tool_calls") or (), message.get("tool_calls") or (), strict=False):
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            call["function"] = {
                "name": call["function"].get("name"),
                "arguments": _arguments(raw["function"].get("arguments")),
            }
    return normalized


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise TemplateRefusedError(
            f"llama.cpp refuses tool call arguments that are not JSON: {arguments[:80]!r}; "
            "mend them before sending",
            template_message=f"Failed to parse tool call arguments as JSON: {error}",
        ) from error


def render_prefill(
    messages: Sequence[Mapping[str, Any]],
    original: Mapping[str, Any],
    render: Callable[[Sequence[Any], bool], str],
) -> str:
    """The prompt for messages whose last one is the assistant's: the model is to continue it.

    Args:
        messages: all messages, normalised.
        original: the last one as the caller passed it.
        render: renders messages, with a generation prompt or without one.

    Raises:
        TemplateRefusedError: what the server refuses to continue.
    """
    last = messages[-1]
    if last.get("tool_calls"):
        raise _refused("Cannot continue an assistant message that contains tool calls.")
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise _refused("Cannot have 2 or more assistant messages at the end of the list.")
    content, reasoning = _raw_content(original), str(last.get("reasoning_content") or "")
    prompt = render(messages[:-1], False)
    if not content and not reasoning:
        return prompt
    before, between = _assistant_header(render)
    if between is None:  # the template writes no reasoning
        return prompt + before + content
    return prompt + before + reasoning + (between + content if content else "")


def _assistant_header(render: Callable[[Sequence[Any], bool], str]) -> tuple[str, str | None]:
    """What the template writes before an answer's reasoning, and between reasoning and content.

    Without reasoning in the template: before the content, and None. Found by rendering a conversation made
    up for it.
    """
    user = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": _CONTENT_MARK, "reasoning_content": _REASONING_MARK}
    prompt = render([user, answer], False).removeprefix(render([user], False))
    header = prompt[: max(prompt.rfind(_CONTENT_MARK), 0)]
    before, mark, between = header.rpartition(_REASONING_MARK)
    return (before, between) if mark else (header, None)


def _raw_content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):  # joined so here, and by one newline in other messages
        return "\n\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _refused(message: str) -> TemplateRefusedError:
    return TemplateRefusedError(f"llama.cpp refuses these messages: {message}", template_message=message)
