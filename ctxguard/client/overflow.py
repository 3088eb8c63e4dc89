"""What a server's answer says about length: `classify`, a pure function of the answer and of our own facts.

Numbers before words. The table in `wordings` finds the sentence and its numbers; the kind then follows
from them (prompt against limit, prompt + output against limit), from what the request was (our count, the
output limit sent, the window), and only last from the words: "max_tokens must be at least 1, got 0" is what
vLLM says when the prompt fills the window. The status is a hint at most: overflows arrive as 400, 413, 422,
500 and as 200 with an error body. An answer that is no error is looked at for silent loss.

`facts_of` takes what `classify` needs off any SDK's exception without importing the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ctxguard.client.answers import classify_answer
from ctxguard.client.bodies import head_and_tail, read_body
from ctxguard.client.classification import OVERFLOWS, Classification, Numbers, RequestFacts
from ctxguard.client.wordings import WORDINGS, Kind, Wording, fingerprint, normalise

__all__ = [
    "Classification",
    "ErrorFacts",
    "Kind",
    "Numbers",
    "RequestFacts",
    "Wording",
    "classify",
    "facts_of",
    "suggest_row",
]

# These say nothing about the prompt, whatever its size: who may ask, where, how often, and who was too slow.
_STATUSES_ABOUT_OTHER_THINGS = frozenset(
    {401, 402, 403, 404, 405, 407, 408, 409, 410, 429, 501, 502, 503, 504, 529}
)

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
    events, text = read_body(body)
    refused = status is not None and status >= 400
    if events and not refused:
        return classify_answer(events, request)

    text = normalise(head_and_tail(text))
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


def _decide(
    row: Wording, found: Mapping[str, int], status: int | None, request: RequestFacts | None
) -> Classification:
    numbers = _numbers_of(row, found, request)
    lower_bound = row.prompt_is_lower_bound or (row.bound_at_border and _is_at_border(numbers))
    kind = row.kind
    if row.disguised:
        kind = _kind_of_disguised(numbers.completion, request)
    elif kind in OVERFLOWS:
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
    _, text = read_body(body)
    digest, numbers = fingerprint(normalise(head_and_tail(text)))
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
