"""What came out of a fit: the messages to send, and an account of what was done to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ctxguard.messages import BrokenRule, Mending, Message
from ctxguard.segments import SegmentReport

Path = Literal["untouched", "known", "compacted", "observed"]


@dataclass(frozen=True)
class Limits:
    """The limits that one call is held to, in tokens.

    Attributes:
        prompt: the prompt may have at most this many (already lowered by the counter's margin).
        high: compaction starts above this.
        low: and goes down to this.
        output: reserved for the response.
        window: the model's window.
    """

    prompt: int
    high: int
    low: int
    output: int
    window: int

    @property
    def grain(self) -> int:
        """Step to which the tokens to free are rounded up.

        A compaction must not depend on the last few tokens of a history: a clock or a "steps left"
        note would make it come out differently on every call.
        """
        return max(16, self.prompt // 64)

    def lowered(self, prompt: int) -> Limits:
        """The same with a lower limit of the prompt, and its marks lowered alike."""
        if prompt >= self.prompt:
            return self
        share = prompt / self.prompt
        return replace(self, prompt=prompt, high=int(self.high * share), low=int(self.low * share))


@dataclass(frozen=True)
class StrategyStep:
    """One strategy at work.

    Attributes:
        name: the strategy.
        tokens_before, tokens_after: the prompt around it.
        notes: what it had to say, e.g. why a summary was refused.
    """

    name: str
    tokens_before: int
    tokens_after: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FitReport:
    """An account of one fit. ``to_dict()`` holds counts and digests only; ``sent`` holds the text.

    Attributes:
        path: ``"untouched"`` (sent as it came), ``"known"`` (a known compaction was applied),
            ``"compacted"`` (compacted anew), ``"observed"`` (mode observe: sent as it came; ``steps``,
            ``dropped`` and ``altered`` say what would have been done).
        limits: what the prompt was held to.
        tokens_before: the prompt before this compaction (the known compaction applied), in tokens.
        tokens_after: the prompt that is sent, in tokens (in mode observe: as it came).
        exact: whether these are the serving template's own counts.
        steps: strategies that ran, in order.
        dropped, altered: messages left out and shortened, against the caller's list.
        history: number of messages that the caller passed.
        broken_rule: the first rule that the caller's own list breaks, or None.
        mendings: what was mended (only with ``mend=True``).
        recomputed: earlier compactions that had to be computed again because the ledger had lost them.
        sent_digest: digest of what is sent, hex.
        segment: where the prompt stands among the trainer's rows (level ``"trajectory"``), else None.
        sent: the messages that are sent.
    """

    path: Path
    limits: Limits
    tokens_before: int
    tokens_after: int
    exact: bool
    history: int
    steps: tuple[StrategyStep, ...] = ()
    dropped: int = 0
    altered: int = 0
    broken_rule: BrokenRule | None = None
    mendings: tuple[Mending, ...] = ()
    recomputed: int = 0
    sent_digest: str = ""
    segment: SegmentReport | None = None
    sent: Sequence[Message] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form without message text."""
        plain = asdict(self)
        plain["sent"] = len(self.sent)
        return plain


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        messages: what to send; the caller's own list object where nothing was changed.
        report: the account of it.
    """

    messages: Sequence[Message]
    report: FitReport
