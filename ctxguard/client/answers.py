"""Answers that are no errors: did the server lose part of the request, or did the window end the answer?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxguard.client.bodies import MAX_EVENTS
from ctxguard.client.classification import Classification, Numbers, RequestFacts
from ctxguard.client.wordings import Kind

_LENGTH_REASONS = frozenset({"length", "max_tokens", "max_output_tokens"})
_WINDOW_REASONS = frozenset(
    {"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"}
)


@dataclass
class _Answer:
    """What an answer tells of its own size, gathered over its events."""

    prompt: int | None = None
    completion: int | None = None
    total: int | None = None
    reason: str | None = None
    choices: int = 1
    truncated: bool = False

    def read(self, part: object) -> None:
        if not isinstance(part, Mapping):
            return
        for key in ("stop_reason", "finish_reason", "done_reason", "finishReason"):
            self._note_reason(part.get(key))
        details = part.get("incomplete_details")
        if isinstance(details, Mapping):
            self._note_reason(details.get("reason"))
        self.truncated = self.truncated or part.get("truncated") is True
        self.prompt = _count(part.get("prompt_eval_count")) or self.prompt
        self.completion = _or(_count(part.get("eval_count")), self.completion)
        usage = part.get("usage")
        if isinstance(usage, Mapping):
            self._read_usage(usage)
        for key in ("response", "message", "delta"):
            self.read(part.get(key))
        choices = part.get("choices")
        if isinstance(choices, list):
            self.choices = max(self.choices, min(len(choices), 1024))
            for choice in choices[:MAX_EVENTS]:
                # Moonshot's streams carry the usage inside the choice.
                self.read(choice)

    def _read_usage(self, usage: Mapping[str, Any]) -> None:
        prompt = _count(usage.get("prompt_tokens"))
        if prompt is None and (prompt := _count(usage.get("input_tokens"))) is not None:
            # Anthropic counts cached tokens beside the input, OpenAI inside it.
            cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
            prompt += sum(_count(usage.get(key)) or 0 for key in cached)
        # A usage of zero means unknown.
        self.prompt = prompt or self.prompt
        self.completion = _or(
            _or(_count(usage.get("completion_tokens")), _count(usage.get("output_tokens"))), self.completion
        )
        self.total = _count(usage.get("total_tokens")) or self.total

    def _note_reason(self, reason: object) -> None:
        if isinstance(reason, str) and reason:
            self.reason = reason.lower()


def _or(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 10**12 else None


def classify_answer(events: Sequence[Mapping[str, Any]], request: RequestFacts | None) -> Classification:
    answer = _Answer()
    for event in events:
        answer.read(event)
    facts = request if request is not None else RequestFacts()
    window = facts.window if facts.window is not None and facts.window > 0 else None
    own = facts.exact_prompt_tokens
    prompt, completion = answer.prompt, answer.completion
    numbers = Numbers(window, prompt, completion, answer.total)
    silent = Kind.SILENT_TRUNCATION

    if answer.reason in _WINDOW_REASONS:
        return Classification(Kind.FINISH_REASON_LENGTH, numbers, evidence="answer.window_exceeded")
    if answer.truncated:
        return Classification(silent, numbers, evidence="answer.truncated_field")
    if own is not None and prompt is not None and _is_cut(own, prompt, window):
        return Classification(silent, numbers, evidence="answer.prompt_cut")
    was_cut = answer.reason in _LENGTH_REASONS
    if was_cut and completion == 0 and prompt is not None and facts.max_output_tokens != 0:
        # Nothing was generated: the prompt was cut so that it fills the window.
        if window is None:
            numbers = replace(numbers, limit=prompt)
        return Classification(silent, numbers, evidence="answer.prompt_fills_window")
    if window is not None and prompt is not None and completion is not None:
        # With n > 1 the usage sums all choices; each had the window to itself.
        used = prompt + completion // answer.choices
        if used > window:
            return Classification(silent, numbers, evidence="answer.past_window")
        if used == window:
            # Ended exactly at the window: said so (length), or passed over in silence.
            kind = Kind.FINISH_REASON_LENGTH if was_cut else silent
            return Classification(kind, numbers, evidence="answer.window_full")
    if was_cut:
        return Classification(Kind.FINISH_REASON_LENGTH, numbers, evidence="answer.output_limit")
    return Classification(Kind.NOT_OVERFLOW, numbers, evidence="answer.complete")


def _is_cut(own: int, served: int, window: int | None) -> bool:
    """Whether the server read clearly fewer prompt tokens than we sent (``own`` is an exact count)."""
    if served >= own:
        return False
    if window is not None and own > window:
        return True
    # Templates of different servers differ by a few tokens; a cut takes a good part.
    return own - served > max(64, own // 10)
