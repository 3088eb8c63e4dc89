"""What a server's answer says about length: `classify`, a pure function of the answer and of our own facts.

Numbers before words. The table in `wordings` finds the sentence and its numbers; the kind then follows
from them (prompt against limit, prompt + output against limit), from what the request was (our count, the
output limit sent, the window), and only last from the words: "max_tokens must be at least 1, got 0" is what
vLLM says when the prompt fills the window. The status is a hint at most: overflows arrive as 400, 413, 422,
500 and as 200 with an error body. An answer that is no error is looked at for silent loss.

`facts_of` takes what `classify` needs off any SDK's exception without importing the SDK.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ctxguard.client.wordings import WORDINGS, Kind, Wording, fingerprint, normalise

__all__ = [
    "Classification",
    "ErrorFacts",
    "Numbers",
    "Kind",
    "RequestFacts",
    "Wording",
    "classify",
    "facts_of",
    "suggest_row",
]

_HEAD_CHARS = 4096
_TAIL_CHARS = 4096
# Longer JSON texts are not parsed but read as head + tail.
_MAX_JSON_CHARS = 1 << 17
_MAX_NODES = 400
_MAX_DEPTH = 12
_MAX_EVENTS = 64

# A body may quote the request (FastAPI's 422 does); an agent's history can say "prompt is too long" itself.
_ECHO_KEYS = frozenset(
    {"input", "messages", "prompt", "tools", "content", "choices", "output", "request", "ctx"}
)
_ANSWER_KEYS = (
    "choices",
    "usage",
    "stop_reason",
    "finish_reason",
    "done_reason",
    "prompt_eval_count",
    "incomplete_details",
    "delta",
)
_LENGTH_REASONS = frozenset({"length", "max_tokens", "max_output_tokens"})
_WINDOW_REASONS = frozenset(
    {"model_context_window_exceeded", "context_window_exceeded", "context_length_exceeded"}
)
_WINDOW_ENDED = frozenset(
    {"answer.window_exceeded", "answer.window_full", "answer.past_window", "answer.prompt_fills_window"}
)

# These say nothing about the prompt, whatever its size: who may ask, where, how often, and who was too slow.
_STATUSES_ABOUT_OTHER_THINGS = frozenset(
    {401, 402, 403, 404, 405, 407, 408, 409, 410, 429, 501, 502, 503, 504, 529}
)

_OVERFLOWS = frozenset({Kind.PROMPT_TOO_LONG, Kind.PROMPT_PLUS_OUTPUT_TOO_LONG})
# Among rows that name equally many numbers, the higher rank is believed.
_RANKS = {
    Kind.RATE_LIMIT_TOKENS: 6,
    Kind.REQUEST_TOO_LARGE: 5,
    Kind.FINISH_REASON_LENGTH: 4,
    Kind.OUTPUT_BUDGET_INVALID: 3,
    Kind.SILENT_TRUNCATION: 3,
    Kind.PROMPT_PLUS_OUTPUT_TOO_LONG: 2,
    Kind.PROMPT_TOO_LONG: 2,
    Kind.NOT_OVERFLOW: 1,
}


@dataclass(frozen=True)
class RequestFacts:
    """What we know of the request that was answered; everything is optional.

    Attributes:
        prompt_tokens: our count of the prompt (messages and tools, as rendered), in tokens.
        exact: whether that count is the serving template's own; an estimate decides nothing.
        max_output_tokens: the output limit that was sent, in tokens; None when none was sent.
        window: the known window, in tokens.
        compacted: whether we changed the messages; a refusal of their structure is then our mistake.
    """

    prompt_tokens: int | None = None
    exact: bool = True
    max_output_tokens: int | None = None
    window: int | None = None
    compacted: bool = False

    @property
    def exact_prompt_tokens(self) -> int | None:
        """The prompt count where it is exact, else None."""
        return self.prompt_tokens if self.exact else None


@dataclass(frozen=True)
class Numbers:
    """The numbers that the answer names, in tokens (characters or bytes for ``request_too_large``).

    Attributes:
        limit: the limit that was hit: window, prompt limit, output cap, quota or size, by kind.
        prompt: size of the prompt.
        completion: output limit that was asked for, or tokens generated.
        total: the sum as the answer states it, or the size or quota use that was refused.
    """

    limit: int | None = None
    prompt: int | None = None
    completion: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Classification:
    """What an answer says about length.

    Attributes:
        kind: see `Kind`.
        numbers: what the answer names. Two exceptions, both our own facts: a kind decided by them alone
            (``evidence`` begins with ``facts.``), and the output limit of ``output_budget_invalid``.
        prompt_is_lower_bound: ``numbers.prompt`` is no measurement (vLLM stops tokenising at the
            border); only the limit can be learnt from these numbers.
        evidence: name of the row or rule that decided; never text of the answer.
        is_structural: the text also refuses the order or pairing of messages. When we compacted the
            request that is our mistake: raise, never compact again.
    """

    kind: Kind
    numbers: Numbers = field(default_factory=Numbers)
    prompt_is_lower_bound: bool = False
    evidence: str = "unknown"
    is_structural: bool = False
    _limit_is_window: bool = field(default=False, repr=False, compare=False)

    @property
    def is_overflow(self) -> bool:
        """Whether a smaller prompt (or, where the prompt fits, a smaller output limit) answers it."""
        return self.kind in _OVERFLOWS

    @property
    def is_output_only(self) -> bool:
        """Whether only the output limit is wrong: correct it, leave the messages alone."""
        return self.kind is Kind.OUTPUT_BUDGET_INVALID

    @property
    def is_silent_loss(self) -> bool:
        """Whether the server accepted the request and lost part of it."""
        return self.kind is Kind.SILENT_TRUNCATION

    @property
    def is_window_full(self) -> bool:
        """Whether an *answer* ended because the window did, not because of its output limit."""
        return self.evidence in _WINDOW_ENDED

    @property
    def is_from_own_facts(self) -> bool:
        """Whether no known wording decided, but our own numbers (report it with `suggest_row`)."""
        return self.evidence.startswith("facts.")

    @property
    def learnt_limit(self) -> int | None:
        """The prompt + output limit, in tokens, that this answer teaches; None if it teaches none."""
        if self.is_from_own_facts or not (self.is_overflow or self._limit_is_window):
            return None
        limit = self.numbers.limit
        return limit if limit is not None and limit > 0 else None

    @property
    def measured_prompt_tokens(self) -> int | None:
        """The prompt's size as the server measured it, or None where it only gave a bound."""
        if not self.is_overflow or self.prompt_is_lower_bound or self.is_from_own_facts:
            return None
        return self.numbers.prompt

    @property
    def output_room(self) -> int | None:
        """Tokens that the limit leaves beside the measured prompt; below 1, only a smaller prompt helps."""
        limit, prompt = self.learnt_limit, self.measured_prompt_tokens
        return None if limit is None or prompt is None else limit - prompt


def classify(
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
    body: object = None,
    request: RequestFacts | None = None,
    extra: Sequence[Wording] = (),
) -> Classification:
    """Say what an answer means for length.

    Args:
        status: HTTP status; None for an exception without one, and for an SSE event.
        headers: response headers; only rate-limit hints are read.
        body: the answer: a mapping (whole body, or the inner ``error`` that SDKs hand out), a list, or
            text (JSON, SSE, an exception's text). Only a bounded head and tail of long text is read.
        request: our own facts; they decide where the text cannot. None means that nothing is known,
            while ``RequestFacts(max_output_tokens=None)`` means that no output limit was sent.
        extra: rows in addition to the built-in table.

    Never raises and keeps nothing of the text. A refusal in unknown words counts as an overflow only if
    our own exact count proves one.
    """
    events, text = _read(body)
    refused = status is not None and status >= 400
    if events and not refused:
        return _classify_answer(events, request)

    text = normalise(_head_and_tail(text))
    table = (*extra, *WORDINGS) if extra else WORDINGS
    row, numbers, structural = _best_row(table, text, status, request)
    if row is not None and row.weak and not _weak_row_holds(status, request):
        row = None
    if row is not None and row.kind is not Kind.NOT_OVERFLOW:
        return replace(_decide(row, numbers, status, request), is_structural=structural)
    if row is not None:
        return Classification(Kind.NOT_OVERFLOW, evidence=row.name, is_structural=structural)
    # An error body counts as a refusal whatever its status: a stream's error event has 200 or none.
    is_refusal = refused or (bool(text) and (status is not None or not isinstance(body, (str, bytes))))
    return _classify_unknown(status, headers, text, request, is_refusal=is_refusal)


# --- reading the body -----------------------------------------------------------------------------------


def _read(body: object) -> tuple[list[Mapping[str, Any]], str]:
    """Split a body into the events of an answer (empty for an error) and the text of an error."""
    if isinstance(body, (bytes, bytearray)):
        body = body.decode("utf-8", "replace")
    if isinstance(body, str):
        stripped = body[:256].lstrip()
        if stripped.startswith(("data:", "event:")):
            events = _sse_events(body)
            if not events:
                return [], _without_answer(body)
            wrong = [event for event in events if _is_error(event)]
            if wrong or not any(map(_is_answer, events)):
                return [], _flatten(wrong or events)
            return events, ""
        if not stripped.startswith(("{", "[")):
            return [], body
        if len(body) > _MAX_JSON_CHARS:
            return [], _without_answer(body)
        parsed = _load(body)
        if parsed is None:
            return [], body
        body = parsed
    if isinstance(body, Mapping) and _is_answer(body):
        return [body], ""
    return [], _flatten(body)


def _without_answer(text: str) -> str:
    """``text`` that cannot be parsed, unless it is an answer: its words would be the model's own."""
    return "" if '"choices"' in text[:_HEAD_CHARS] else text


def _load(text: str) -> Mapping[str, Any] | list[Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _head_and_tail(text: str) -> str:
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS:
        return text
    return text[:_HEAD_CHARS] + " \u2026 " + text[-_TAIL_CHARS:]


def _sse_events(text: str) -> list[Mapping[str, Any]]:
    """The JSON objects of a stream's ``data:`` lines; of a long stream the first and the last ones."""
    if len(text) > 2 * _MAX_JSON_CHARS:
        text = text[:_MAX_JSON_CHARS] + "\n" + text[-_MAX_JSON_CHARS:]
    lines = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    if len(lines) > _MAX_EVENTS:
        lines = lines[: _MAX_EVENTS // 2] + lines[-_MAX_EVENTS // 2 :]
    return [event for event in map(_load, lines) if isinstance(event, Mapping)]


def _is_error(body: Mapping[str, Any]) -> bool:
    if body.get("error") or body.get("errors") or body.get("type") in ("error", "response.failed"):
        return True
    base = body.get("base_resp")
    if isinstance(base, Mapping) and base.get("status_code"):
        return True
    choice = _first(body.get("choices"))
    return bool(choice.get("error"))


def _is_answer(body: Mapping[str, Any]) -> bool:
    return not _is_error(body) and any(body.get(key) is not None for key in _ANSWER_KEYS)


def _first(items: object) -> Mapping[str, Any]:
    if isinstance(items, list) and items and isinstance(items[0], Mapping):
        return items[0]
    return {}


def _flatten(body: object) -> str:
    """The body's strings and numbers as ``key: value; …``, without what it quotes of the request."""
    pieces: list[str] = []
    room = _HEAD_CHARS + _TAIL_CHARS
    for piece in _pieces(body, depth=0):
        pieces.append(_head_and_tail(piece))
        room -= len(pieces[-1])
        if room < 0 or len(pieces) > _MAX_NODES:
            break
    return "; ".join(pieces)


def _pieces(value: object, depth: int) -> Iterator[str]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key == "choices":
                # OpenRouter puts the error of a 200 there; the rest is the model's own text
                yield from _pieces(_first(item).get("error"), depth + 1)
            if key in _ECHO_KEYS:
                continue
            if isinstance(item, (Mapping, list, tuple)):
                # "loc: body, max_tokens" reads better than the path cut in two
                first = True
                for piece in _pieces(item, depth + 1):
                    yield f"{key}: {piece}" if first else piece
                    first = False
            elif isinstance(item, (str, float)) or (isinstance(item, int) and abs(item) < 10**12):
                yield f"{key}: {item}"
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, str) for item in value):
            yield ", ".join(value[:_MAX_NODES])
        else:
            for item in value[:_MAX_NODES]:
                yield from _pieces(item, depth + 1)


# --- finding the row ------------------------------------------------------------------------------------


def _best_row(
    table: Sequence[Wording], text: str, status: int | None, request: RequestFacts | None
) -> tuple[Wording | None, dict[str, int], bool]:
    """The row to believe, the numbers it names, and whether any row complains about structure."""
    if not text:
        return None, {}, False
    compacted = request is not None and request.compacted
    best: Wording | None = None
    best_numbers: dict[str, int] = {}
    best_score = (-1, -1)
    structural = False
    digest: tuple[str, list[int]] | None = None
    for row in table:
        if best is not None and row.kind is Kind.NOT_OVERFLOW and not row.structural:
            continue  # it could not win any more
        if row.digest:
            digest = digest or fingerprint(text)
            numbers = row.find_by_digest(*digest)
        else:
            numbers = row.find(text)
        if numbers is None or (row.off_http and status is not None):
            continue
        structural = structural or row.structural
        # After a compaction a complaint about structure is more specific than any vague word.
        score = (len(numbers), 7 if row.structural and compacted else _RANKS[row.kind])
        if score > best_score:
            best, best_numbers, best_score = row, numbers, score
    return best, best_numbers, structural


def _weak_row_holds(status: int | None, request: RequestFacts | None) -> bool:
    """Whether an ambiguous wording may be read as an overflow, given our own facts."""
    if request is None or request.exact_prompt_tokens is None or request.window is None:
        return status != 413
    return request.exact_prompt_tokens + (request.max_output_tokens or 0) > request.window


# --- deciding -------------------------------------------------------------------------------------------


def _decide(
    row: Wording, found: Mapping[str, int], status: int | None, request: RequestFacts | None
) -> Classification:
    numbers = _numbers_of(row, found, request)
    lower_bound = row.prompt_is_lower_bound or (row.bound_at_border and _is_at_border(numbers))
    kind = row.kind
    if row.disguised:
        kind = _kind_of_disguised(numbers.completion, request)
    elif kind in _OVERFLOWS:
        kind = _kind_by_numbers(kind, numbers, lower_bound, request)
    elif kind is Kind.SILENT_TRUNCATION and status is not None and status >= 400:
        kind = Kind.PROMPT_TOO_LONG
    if kind is Kind.OUTPUT_BUDGET_INVALID and numbers.completion is None and request is not None:
        numbers = replace(numbers, completion=request.max_output_tokens)
    return Classification(
        kind,
        numbers,
        lower_bound,
        row.name,
        _limit_is_window=row.limit_is_window and numbers.limit is not None,
    )


def _numbers_of(row: Wording, found: Mapping[str, int], request: RequestFacts | None) -> Numbers:
    limit, prompt = found.get("limit"), found.get("prompt")
    completion, total = found.get("completion"), found.get("total")
    if limit is not None:
        limit += row.limit_offset
    if prompt is None and total is not None and row.prompt_from_total:
        prompt = total - (completion or 0)
    excess = found.get("excess")
    if excess is not None and limit is not None:
        prompt = limit + excess
    elif excess is not None and request is not None and request.exact_prompt_tokens is not None:
        # The text names only the excess; our exact count turns it into the limit.
        limit = request.exact_prompt_tokens - excess
        limit = limit if limit > 0 else None
    return Numbers(limit, prompt, completion, total)


def _is_at_border(numbers: Numbers) -> bool:
    if numbers.limit is None or numbers.prompt is None:
        return False
    return numbers.prompt in (numbers.limit + 1, numbers.limit + 1 - (numbers.completion or 0))


def _kind_by_numbers(hint: Kind, numbers: Numbers, lower_bound: bool, request: RequestFacts | None) -> Kind:
    """Prompt alone, or prompt + output? ``hint`` (what the words say) stands where numbers are missing."""
    limit, prompt, completion = numbers.limit, numbers.prompt, numbers.completion
    if completion is None and request is not None:
        completion = request.max_output_tokens
    if prompt is None and numbers.total is not None and completion is not None:
        prompt = numbers.total - completion
    own = request.exact_prompt_tokens if request is not None else None
    if limit is not None and own is not None and own >= limit and (lower_bound or prompt is None):
        return Kind.PROMPT_TOO_LONG
    if limit is None or prompt is None:
        return Kind.PROMPT_TOO_LONG if numbers.completion == 0 else hint
    # A prompt that equals the limit leaves no room either; only a text that itself speaks of the sum
    # ("2049 in your prompt, 5 for the completion", limit 2049) is taken at its word.
    if prompt > limit or (prompt == limit and numbers.completion is None):
        return Kind.PROMPT_TOO_LONG
    if completion is not None and prompt + completion > limit:
        return Kind.PROMPT_PLUS_OUTPUT_TOO_LONG
    return hint


def _kind_of_disguised(got: int | None, request: RequestFacts | None) -> Kind:
    """ "max_tokens must be at least 1, got N": who made N, the client or the server from window - prompt?"""
    if got is not None and got < 0:
        return Kind.PROMPT_TOO_LONG
    if request is None or got is None or got > 0:
        return Kind.OUTPUT_BUDGET_INVALID
    if _fills(request.exact_prompt_tokens, request.window):
        return Kind.PROMPT_TOO_LONG
    sent = request.max_output_tokens
    return Kind.PROMPT_TOO_LONG if sent is None or sent > 0 else Kind.OUTPUT_BUDGET_INVALID


def _fills(tokens: int | None, window: int | None) -> bool:
    return tokens is not None and window is not None and window > 0 and tokens >= window


def _classify_unknown(
    status: int | None,
    headers: Mapping[str, str] | None,
    text: str,
    request: RequestFacts | None,
    *,
    is_refusal: bool,
) -> Classification:
    """No known wording: our own facts, then the status."""
    if status == 429:
        quota = _token_quota_is_spent(headers)
        kind = Kind.RATE_LIMIT_TOKENS if quota else Kind.NOT_OVERFLOW
        return Classification(kind, evidence="headers.token_quota" if quota else "status.429")
    if is_refusal and request is not None and status not in _STATUSES_ABOUT_OTHER_THINGS:
        by_facts = _classify_by_facts(request)
        if by_facts is not None:
            return by_facts
    if status == 413:
        return Classification(Kind.REQUEST_TOO_LARGE, evidence="status.413")
    return Classification(Kind.NOT_OVERFLOW, evidence="unknown" if text else "empty")


def _classify_by_facts(request: RequestFacts) -> Classification | None:
    window, output, prompt = request.window, request.max_output_tokens, request.exact_prompt_tokens
    if window is None or window <= 0:
        return None
    numbers = Numbers(window, prompt, output)
    if _fills(prompt, window):
        return Classification(Kind.PROMPT_TOO_LONG, numbers, evidence="facts.prompt_fills_window")
    if _fills(output, window):
        return Classification(Kind.OUTPUT_BUDGET_INVALID, numbers, evidence="facts.output_fills_window")
    if prompt is not None and output is not None and prompt + output > window:
        return Classification(Kind.PROMPT_PLUS_OUTPUT_TOO_LONG, numbers, evidence="facts.sum_exceeds_window")
    return None


def _token_quota_is_spent(headers: Mapping[str, str] | None) -> bool:
    """Whether the rate-limit headers say that the tokens, not the requests, are used up."""
    names = ("x-ratelimit-remaining-tokens", "anthropic-ratelimit-tokens-remaining")
    return any(str(name).lower() in names and str(left) == "0" for name, left in (headers or {}).items())


# --- answers that are no errors -------------------------------------------------------------------------


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
            for choice in choices[:_MAX_EVENTS]:
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


def _classify_answer(events: Sequence[Mapping[str, Any]], request: RequestFacts | None) -> Classification:
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


# --- exceptions, and unknown words ----------------------------------------------------------------------


class ErrorFacts(NamedTuple):
    """What an exception carries of the server's answer; ``classify(**facts_of(error)._asdict())``."""

    status: int | None
    headers: Mapping[str, str] | None
    body: object


def facts_of(error: BaseException) -> ErrorFacts:
    """Status, headers and body of any SDK's exception, by duck typing, the direct cause included.

    ``body`` is the exception's own ``body`` where it has one, else the response's text, else the text of
    the exception and of its cause.
    """
    chain = [error] if error.__cause__ is None else [error, error.__cause__]
    status: int | None = None
    headers: Mapping[str, str] | None = None
    body: object = None
    for one in chain:
        response = _get(one, "response")
        if status is None:
            status = _status_of(one, response)
        found = _get(response, "headers")
        if headers is None and isinstance(found, Mapping):
            headers = found
        for found in (_get(one, "body"), _get(response, "text")):
            if not body and isinstance(found, (Mapping, list, str, bytes)):
                body = found
    return ErrorFacts(status, headers, body or "\n".join(_text_of(one) for one in chain))


def _status_of(error: BaseException, response: object) -> int | None:
    places = ((error, "status_code"), (response, "status_code"), (error, "http_status"), (error, "status"))
    for place, name in (*places, (error, "code")):
        value = _get(place, name)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:
            return int(value)
    return None


def _get(obj: object, name: str) -> object:
    try:
        return getattr(obj, name, None)
    except Exception:  # a property of a foreign class: an unread httpx response raises its own error
        return None


def _text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # a foreign __str__
        text = ""
    return f"{type(error).__name__}: {text}"


def suggest_row(classification: Classification, *, body: object, request: RequestFacts | None = None) -> str:
    """A row for the table, ready to paste (or to pass as ``extra``), that recognises this body again.

    It holds a digest of the words and the roles of the numbers (found by comparing them with our own
    facts), never text: a body may quote the conversation. Replace the digest by a pattern when the
    text may be shown.
    """
    _, text = _read(body)
    digest, numbers = fingerprint(normalise(_head_and_tail(text)))
    facts = request if request is not None else RequestFacts()
    prompt, output = facts.prompt_tokens, facts.max_output_tokens
    total = prompt + output if prompt is not None and output is not None else None
    # The later wins where two are equal: the limit is what matters most.
    known = {total: "total", output: "completion", prompt: "prompt", facts.window: "limit"}
    roles: list[str] = []
    for number in numbers:
        role = known.get(number, "")
        roles.append(role if role not in roles else "")
    kind = f"Kind.{classification.kind.name}"
    return f'Wording("unnamed.{digest[:8]}", {kind}, digest="{digest}", roles={tuple(roles)!r}),'
