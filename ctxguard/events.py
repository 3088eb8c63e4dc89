"""What happened, as typed data. Numbers and digests only: never message text.

Each event goes to the guard's ``on_event`` callable and into the rollout's scope. Token figures are
tokens of the whole prompt as the counter counts it; ``exact`` says whether the server would agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events.

    Attributes:
        model: the model named in the request.
        rollout_id: the rollout it belongs to, None outside a scope.
        attempt_id: the attempt of that rollout, None where unknown.
        call: running number of the call in its scope (or of the guard, outside a scope), from 1.
    """

    kind: ClassVar[str] = "event"
    model: str
    rollout_id: str | None
    attempt_id: str | None
    call: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form, with ``kind``."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Counted(Event):
    """A request was counted and is about to be sent.

    Attributes:
        prompt_tokens: tokens of what is sent.
        prompt_limit: the limit it is held to.
        output_tokens: tokens reserved for the response.
        exact: whether the count is the serving template's own.
        path: ``"untouched"``, ``"known"`` (a known compaction), ``"compacted"``, ``"observed"``.
        messages: number of messages sent.
        history: number of messages the caller passed.
        digest: digest of the messages sent, hex.
    """

    kind: ClassVar[str] = "counted"
    prompt_tokens: int
    prompt_limit: int
    output_tokens: int
    exact: bool
    path: str
    messages: int
    history: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Compacted(Event):
    """The history was compacted for this call.

    Attributes:
        tokens_before, tokens_after: the view before and after, in tokens.
        dropped: messages left out, altered: messages shortened (both against the caller's list).
        strategies: ``(name, tokens freed)`` in the order they ran.
        reason: ``"high_mark"``, ``"limit"`` or ``"refused"`` (the server refused the former try).
    """

    kind: ClassVar[str] = "compacted"
    tokens_before: int
    tokens_after: int
    dropped: int
    altered: int
    strategies: tuple[tuple[str, int], ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """The server refused a request for its length.

    Attributes:
        refusal: kind of refusal, e.g. ``"prompt_too_long"``.
        status: HTTP status, None where there was none.
        prompt_tokens: our count of what was sent.
        limit: the limit that the server named, None if it named none.
        learnt: whether the limit was new to us.
        evidence: which rule recognised it.
    """

    kind: ClassVar[str] = "refused"
    refusal: str
    status: int | None
    prompt_tokens: int
    limit: int | None
    learnt: bool
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Answered(Event):
    """The server answered.

    Attributes:
        predicted_tokens: our count of what was sent.
        served_tokens: ``usage.prompt_tokens``, None where the answer does not say (most streams).
        completion_tokens: ``usage.completion_tokens`` or None.
        exact: whether the prediction claimed to be exact.
        attempts: requests it took; more than 1 is a recovery.
    """

    kind: ClassVar[str] = "answered"
    predicted_tokens: int
    served_tokens: int | None
    completion_tokens: int | None
    exact: bool
    attempts: int


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The call ended without an answer because of its length.

    Attributes:
        reason: as `ContextOverflowError.reason`.
        prompt_tokens, limit, window: as on the error.
        attempts: requests sent.
    """

    kind: ClassVar[str] = "failed"
    reason: str
    prompt_tokens: int | None
    limit: int | None
    window: int | None
    attempts: int


@dataclass(frozen=True, kw_only=True)
class OutputLimited(Event):
    """The request's output limit was set or lowered, because the user asked for ``response="enforce"``.

    Attributes:
        field: name of the request field, e.g. ``"max_tokens"``.
        before: its former value, None if it was absent.
        after: its new value.
    """

    kind: ClassVar[str] = "output_limited"
    field: str
    before: int | None
    after: int


@dataclass(frozen=True, kw_only=True)
class FieldAdded(Event):
    """The request went out with a field that the caller did not set.

    Attributes:
        field: name of the request field, e.g. ``"return_token_ids"``.
        value: its value.
        reason: what it is for.
    """

    kind: ClassVar[str] = "field_added"
    field: str
    value: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Placed(Event):
    """An answered call has its place among the rows that a trainer merges calls into (level "trajectory").

    Attributes:
        row: running number of the row in its rollout, from 1.
        starts: whether the call starts the row (or may, where the trainer's order of calls is not known).
        prompt_tokens: tokens of its prompt, as the server has them where it returned the ids.
        first_prompt_tokens: tokens of the row's first prompt.
        row_limit: the most tokens that its prompt might have there.
        conditional: why this, and so the promise that the row is neither cut nor dropped, is not certain;
            ``""`` where it is.
    """

    kind: ClassVar[str] = "placed"
    row: int
    starts: bool
    prompt_tokens: int
    first_prompt_tokens: int
    row_limit: int
    conditional: str
