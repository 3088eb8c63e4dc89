"""The rules that chat templates and servers hold a history to: checking them, and mending what broke."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ctxguard.messages.content import Message, tool_calls_of
from ctxguard.messages.turns import RESULT_ROLES, SYSTEM_ROLES, is_text_result

RuleName = Literal[
    "empty_list",
    "bad_role_order",
    "reused_tool_call_id",
    "orphan_result",
    "unanswered_call",
    "no_user_message",
]

KNOWN_ROLES = frozenset({"user", "assistant"}) | SYSTEM_ROLES | RESULT_ROLES
UNANSWERED = "[no result: this call was never answered]"


@dataclass(frozen=True)
class BrokenRule:
    """The first rule that a message list breaks.

    Attributes:
        rule: which one.
        index: position of the message that breaks it, None where the list as a whole does.
        detail: what is wrong, without message text.
    """

    rule: RuleName
    index: int | None
    detail: str


@dataclass(frozen=True)
class Mending:
    """One thing that `mend_messages` changed.

    Attributes:
        rule: the rule that was broken.
        index: position in the caller's list.
        action: ``"dropped"``, ``"inserted"``, ``"renamed"`` or ``"role changed"``.
    """

    rule: RuleName
    index: int
    action: str


def check_messages(messages: Sequence[Message]) -> BrokenRule | None:
    """The first broken rule, or None.

    Order of the checks: the empty list; then message by message bad role order (an unknown role, a
    system message behind others), orphan results, re-used ids, calls still unanswered when the next
    assistant, user or system message comes; at the end a history with no user message. Calls of the
    last assistant message may still be open.
    """
    if not messages:
        return BrokenRule("empty_list", None, "the message list is empty")
    seen: set[str] = set()
    unanswered: dict[str, int] = {}
    past_system = False
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in KNOWN_ROLES:
            return BrokenRule("bad_role_order", index, f"unknown role {str(role)!r:.40}")
        if role in RESULT_ROLES:
            past_system = True
            key = _result_key(message)
            if key not in unanswered:
                return BrokenRule("orphan_result", index, "a tool result that no open call asked for")
            del unanswered[key]
            continue
        if unanswered:
            at = next(iter(unanswered.values()))
            return BrokenRule("unanswered_call", at, "a tool call has no result before the next message")
        if role in SYSTEM_ROLES:
            if past_system:
                return BrokenRule("bad_role_order", index, "a system message behind other messages")
            continue
        past_system = True
        for key in _call_keys(message):
            if key in seen:
                return BrokenRule("reused_tool_call_id", index, "a tool_call_id was used before")
            if message.get("tool_calls"):
                seen.add(key)
            unanswered[key] = index
    last_call = next(iter(unanswered.values()), None)
    if last_call is not None and any(m.get("role") in RESULT_ROLES for m in messages[last_call:]):
        return BrokenRule("unanswered_call", last_call, "only some of the parallel calls have results")
    if not any(_is_users_own(messages, index) for index in range(len(messages))):
        return BrokenRule("no_user_message", None, "no user message: there is no task")
    return None


def _is_users_own(messages: Sequence[Message], index: int) -> bool:
    """A user message that is not a tool result in text form."""
    if messages[index].get("role") != "user":
        return False
    answers = is_text_result(messages[index]) and any(m.get("role") == "assistant" for m in messages[:index])
    return not answers


def _result_key(message: Message) -> str:
    return str(message.get("tool_call_id") or message.get("name") or "")


def _call_keys(message: Message) -> list[str]:
    keys = []
    for call in tool_calls_of(message):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else ""
        keys.append(str(call.get("id") or name or ""))
    return keys


def mend_messages(messages: Sequence[Message]) -> tuple[list[Message], list[Mending]]:
    """A list without orphan results, open calls, re-used ids or stray system messages, and what changed.

    Orphan results are dropped, unanswered calls get a result that says so, re-used ids get a suffix
    (call and result alike), a late system message becomes a user message. An empty list and a
    history without a task are left as they are: nothing true can be put there. The caller's dicts
    are not touched.
    """
    mended: list[Message] = []
    changes: list[Mending] = []
    seen: set[str] = set()
    unanswered: dict[str, tuple[str, int]] = {}  # the caller's id → (id sent, index of the call)
    last_assistant = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
    has_results = any(m.get("role") in RESULT_ROLES for m in messages[last_assistant + 1 :])

    def close_calls() -> None:
        for sent_id, at in unanswered.values():
            mended.append({"role": "tool", "tool_call_id": sent_id, "content": UNANSWERED})
            changes.append(Mending("unanswered_call", at, "inserted"))
        unanswered.clear()

    for index, message in enumerate(messages):
        role = message.get("role")
        if role in RESULT_ROLES:
            key = _result_key(message)
            if key not in unanswered:
                changes.append(Mending("orphan_result", index, "dropped"))
                continue
            sent_id, _ = unanswered.pop(key)
            mended.append(message if sent_id == key else {**message, "tool_call_id": sent_id})
            continue
        close_calls()
        if role in SYSTEM_ROLES and any(m.get("role") not in SYSTEM_ROLES for m in mended):
            message = {**message, "role": "user"}
            changes.append(Mending("bad_role_order", index, "role changed"))
        elif message.get("tool_calls") and role == "assistant":
            message, renamed = _with_unique_ids(message, seen)
            if renamed:
                changes.append(Mending("reused_tool_call_id", index, "renamed"))
            originals = _call_keys(messages[index])
            for original, sent in zip(originals, _call_keys(message), strict=True):
                unanswered[original] = (sent, index)
        elif tool_calls_of(message):
            unanswered.update({key: (key, index) for key in _call_keys(message)})
        mended.append(message)
    if has_results:
        close_calls()
    return mended, changes


def _with_unique_ids(message: Message, seen: set[str]) -> tuple[Message, bool]:
    calls: list[Any] = []
    renamed = False
    for call in message["tool_calls"]:
        call_id = unique = str(call.get("id") or "")
        suffix = 2
        while unique in seen:
            unique, suffix = f"{call_id}-{suffix}", suffix + 1
        seen.add(unique)
        renamed = renamed or unique != call_id
        calls.append(call if unique == call_id else {**call, "id": unique})
    return ({**message, "tool_calls": calls}, True) if renamed else (message, False)
