"""The messages that were sent, on the span of the call."""

from __future__ import annotations

import json
import sys
from typing import Any

from ctxguard.integrations.agentlightning.marking import active_tracer
from ctxguard.manager import FitReport

SENT_SPAN = "ctxguard.sent"
"""Name of the span that is made where the call itself has none."""

SENT_MESSAGES = "ctxguard.sent.messages"
"""Attribute with the messages that were sent, as JSON."""

SENT_TOKENS = "ctxguard.sent.prompt_tokens"
"""Attribute with their number of tokens, tools included."""


def record_sent(report: FitReport) -> None:
    """Put the messages that are sent on the call's span: ``Guard(…, on_report=record_sent)``.

    A span shows what the agent passed, the token ids what was sent; after a compaction these differ, and
    this adds what was sent. Off unless asked for: it writes the text of conversations into the trace. Calls
    that go out as they came add nothing.

    On the span of the call where the tracer makes one (AgentOps), else on a new one (`SENT_SPAN`) in the
    running rollout's trace; outside of both nothing is written.
    """
    if report.path in ("untouched", "observed"):
        return
    attributes = {
        SENT_MESSAGES: json.dumps(
            [dict(message) for message in report.sent], ensure_ascii=False, default=str
        ),
        SENT_TOKENS: report.tokens_after,
    }
    span = _current_span()
    if span is not None:
        span.set_attributes(attributes)
        return
    tracer = active_tracer()
    if tracer is not None:
        tracer.create_span(SENT_SPAN, attributes=attributes)


def _current_span() -> Any:
    trace = sys.modules.get("opentelemetry.trace")
    span = trace.get_current_span() if trace is not None else None
    return span if span is not None and span.is_recording() else None
