"""What is known of a request, and what an answer to it turns out to say about length."""

from __future__ import annotations

from dataclasses import dataclass, field

from ctxguard.client.wordings import Kind

OVERFLOWS = frozenset({Kind.PROMPT_TOO_LONG, Kind.PROMPT_PLUS_OUTPUT_TOO_LONG})
_WINDOW_ENDED = frozenset(
    {"answer.window_exceeded", "answer.window_full", "answer.past_window", "answer.prompt_fills_window"}
)


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
        return self.kind in OVERFLOWS

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
