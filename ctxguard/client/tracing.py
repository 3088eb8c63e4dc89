"""What a tracer sees of a guarded call. OpenTelemetry is not imported: where it is not loaded nobody traces.

Agent Lightning trains on the spans that its tracers record of the OpenAI client (AgentOps, among others): a
request of ours must leave none, and a call that was refused must not look like a completion.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNANSWERED = "ctxguard.unanswered"
"""Name of the span of a call that ended in a context overflow."""

_COMPLETION = re.compile(r"openai\.chat\.completion")
# The spans that Agent Lightning takes for model calls (``llm_call_match`` of its TracerTraceToTriplet).


@contextmanager
def untraced() -> Iterator[None]:
    """Suppress OpenTelemetry instrumentations, for requests of our own: summaries, questions to the server.

    They ask the context for a key; the older ones for a plain name (see ``suppress_instrumentation`` of
    opentelemetry-instrumentation, which need not be installed).
    """
    context = sys.modules.get("opentelemetry.context")
    if context is None:
        yield
        return
    suppressed = context.set_value("suppress_instrumentation", True)
    key = getattr(context, "_SUPPRESS_INSTRUMENTATION_KEY", None)
    token = context.attach(suppressed if key is None else context.set_value(key, True, suppressed))
    try:
        yield
    finally:
        context.detach(token)


def name_unanswered_span() -> None:
    """Say on the span of a chat completion, if one is being recorded, that there was no completion.

    Agent Lightning goes by the name and would make a triplet without tokens of it. The span stays, with the
    error that its instrumentation puts there.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    span = trace.get_current_span()
    if span.is_recording() and _COMPLETION.search(getattr(span, "name", "")):
        span.update_name(UNANSWERED)
