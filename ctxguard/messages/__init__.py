"""Messages and turns: reading them, grouping them, checking and mending them.

In: the caller's list of OpenAI-form messages, native or with tools in text form. Out: turns, the
unit that compaction works on, and back to the very same list. Nothing here counts or sends.
"""

from ctxguard.messages.content import (
    Message,
    as_messages,
    part_texts,
    reasoning_of,
    text_of,
    tool_calls_of,
    with_part_texts,
    without_reasoning,
)
from ctxguard.messages.dialects import DIALECTS, Dialect
from ctxguard.messages.rules import BrokenRule, Mending, check_messages, mend_messages
from ctxguard.messages.turns import (
    TextSpan,
    Turn,
    first_task,
    flatten_turns,
    group_turns,
    is_text_result,
    lead_length,
    newest_turn,
)

__all__ = [
    "DIALECTS",
    "BrokenRule",
    "Dialect",
    "Mending",
    "Message",
    "TextSpan",
    "Turn",
    "as_messages",
    "check_messages",
    "first_task",
    "flatten_turns",
    "group_turns",
    "is_text_result",
    "lead_length",
    "mend_messages",
    "newest_turn",
    "part_texts",
    "reasoning_of",
    "text_of",
    "tool_calls_of",
    "with_part_texts",
    "without_reasoning",
]
