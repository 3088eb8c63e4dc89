"""What tool schemas cost with OpenAI's models: the cookbook's formula, carried on into nested schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# OpenAI cookbook, "How to count tokens with tiktoken", num_tokens_for_tools.
_PROPERTIES_START, _PROPERTY, _ENUM_START, _ENUM_ITEM, _TOOLS_END = 3, 3, -3, 3, 12


def tool_schema_tokens(
    tools: Sequence[Mapping[str, Any]], count: Callable[[str], int], *, function_start: int = 7
) -> int:
    """Tokens of the tool schemas of a request.

    Args:
        tools: OpenAI tool schemas.
        count: tokens of a text.
        function_start: fixed cost of a function: 7, or 10 for gpt-4 and gpt-3.5-turbo.
    """
    total = _TOOLS_END
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        total += function_start + count(f"{function.get('name', '')}:{_description(function)}")
        total += _object_tokens(function.get("parameters"), count)
    return total


def _object_tokens(schema: Any, count: Callable[[str], int]) -> int:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not properties:
        return 0
    return _PROPERTIES_START + sum(
        _property_tokens(str(name), value, count) for name, value in properties.items()
    )


def _property_tokens(name: str, schema: Any, count: Callable[[str], int]) -> int:
    if not isinstance(schema, Mapping):
        return _PROPERTY + count(name)
    total = _PROPERTY + count(f"{name}:{schema.get('type', '')}:{_description(schema)}")
    choices = schema.get("enum")
    if isinstance(choices, list | tuple) and choices:
        total += _ENUM_START + sum(_ENUM_ITEM + count(str(choice)) for choice in choices)
    # Not in the cookbook, which stops at flat schemas: what is nested is counted alike.
    total += _object_tokens(schema, count)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            total += _property_tokens("", schema[key], count)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list | tuple):
            total += sum(_property_tokens("", option, count) for option in schema[key])
    return total


def _description(schema: Mapping[str, Any]) -> str:
    return str(schema.get("description") or "").removesuffix(".")
