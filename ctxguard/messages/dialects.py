"""Tools in text form: calls and results that stand as tagged text in ordinary messages.

Qwen-Agent's default form, Hermes agents and ReAct agents send no ``tools`` and no ``tool`` role. A
call is text in an assistant message, a result is text in a *user* message. A dialect knows how to
see both, so that a result is never taken for the user's task and is never parted from its call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

Span = tuple[int, int]
"""Start and end offset in a text, in characters."""


@dataclass(frozen=True)
class Dialect:
    """One way of writing tool calls and results as text.

    Attributes:
        name: the dialect's name, for reports.
        call_names: names of the tools that an assistant text calls, in order; empty if it calls none.
        calls_start: offset at which the calls begin in an assistant text; the prose before it may
            be shortened, the calls may not.
        result_spans: spans of the result bodies in a user text (tags left out), in order; empty if
            the text is not a result.
    """

    name: str
    call_names: Callable[[str], list[str]]
    calls_start: Callable[[str], int]
    result_spans: Callable[[str], list[Span]]


_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_HERMES_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_REACT_CALL = re.compile(r"^Action:[ \t]*(.+?)[ \t]*$", re.MULTILINE)
_REACT_CALL_START = re.compile(r"^Action:", re.MULTILINE)
_REACT_RESULT = re.compile(r"\A\s*Observation:[ \t]?\n?")


def _hermes_call_names(text: str) -> list[str]:
    return [_json_name(body) for body in _HERMES_CALL.findall(text)]


def _json_name(body: str) -> str:
    try:
        call = json.loads(body)
    except ValueError:
        return ""
    name = call.get("name") if isinstance(call, dict) else None
    return name if isinstance(name, str) else ""


def _hermes_result_spans(text: str) -> list[Span]:
    # The same test as in the Qwen chat templates; a user message that merely quotes the tag is no result.
    if not text.lstrip().startswith("<tool_response>"):
        return []
    return [match.span(1) for match in _HERMES_RESULT.finditer(text)]


def _react_result_spans(text: str) -> list[Span]:
    match = _REACT_RESULT.match(text)
    return [(match.end(), len(text))] if match else []


def _first(pattern: re.Pattern[str]) -> Callable[[str], int]:
    def start(text: str) -> int:
        match = pattern.search(text)
        return match.start() if match else len(text)

    return start


HERMES = Dialect("hermes", _hermes_call_names, _first(re.compile("<tool_call>")), _hermes_result_spans)
"""Hermes / Qwen "nous" tags: ``<tool_call>{json}</tool_call>``, ``<tool_response>…</tool_response>``."""

REACT = Dialect("react", _REACT_CALL.findall, _first(_REACT_CALL_START), _react_result_spans)
"""ReAct: ``Action: name`` / ``Action Input: …`` answered by ``Observation: …``."""

DIALECTS: tuple[Dialect, ...] = (HERMES, REACT)
"""All dialects, in the order in which they are tried."""


def result_dialect(text: str) -> Dialect | None:
    """The dialect in which this user text is a tool result, or None."""
    return next((dialect for dialect in DIALECTS if dialect.result_spans(text)), None)


def call_dialect(text: str) -> Dialect | None:
    """The dialect in which this assistant text calls a tool, or None."""
    return next((dialect for dialect in DIALECTS if dialect.call_names(text)), None)
