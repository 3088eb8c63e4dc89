"""One call among the rows of a trainer that merges calls (a budget of level "trajectory").

Before the call it says how long a prompt may be that goes on from the call before; when the answer is there
it notes where the call came to stand, by the server's own token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxguard.budget import ContextBudget
from ctxguard.effects import Answer, TokenIds
from ctxguard.errors import TemplateRefusedError
from ctxguard.manager import Fit
from ctxguard.messages import Message
from ctxguard.segments import (
    COUNT_DIFFERS,
    COUNT_ESTIMATED,
    NO_IDS_FROM_COUNTER,
    NO_IDS_FROM_SERVER,
    Place,
    SegmentCall,
    SegmentReport,
    Segments,
)
from ctxguard.tokens.base import GivesTokenIds, TokenCounter, Tool
from ctxguard.tokens.media import has_media


class CallRows:
    """What one call knows of the rows of its rollout. Made when the call begins, closed when it ends.

    Args:
        segments: of the rollout's scope.
        counter: counts the prompts; its ``ids`` are used where it has them.
        tools, template_kwargs: the request's own.
    """

    def __init__(
        self,
        segments: Segments,
        counter: TokenCounter,
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._segments = segments
        self._counter = counter
        self._tools = tools
        self._template_kwargs = template_kwargs
        self._opened = segments.begin()
        self._budget: ContextBudget | None = None
        self._output_tokens = 0
        self._prompt_limit: int | None = None
        self._ids: dict[tuple[int, ...], tuple[Sequence[Message], Sequence[int] | None]] = {}

    def hold(self, budget: ContextBudget, output_tokens: int, prompt_limit: int | None) -> None:
        """Set what the next fit is held to; it changes when the server refuses a try."""
        self._budget = budget
        self._output_tokens = output_tokens
        self._prompt_limit = prompt_limit

    # What the manager asks (`ctxguard.manager.fold.Rows`).

    def limit(self, view: Sequence[Message], first_prompt_limit: int) -> int | None:
        """The most tokens that this prompt may have; None where it starts a row."""
        place = self._place(view)
        if not place.row_starts or self._budget is None:
            return None
        start = place.first_prompt_tokens(min(place.row_starts))
        limit = int(self._budget.joining_limit(start, self._output_tokens) / (1 + self._counter.margin))
        if place.starts:
            limit = min(limit, first_prompt_limit)
        return max(1, limit if self._prompt_limit is None else min(limit, self._prompt_limit))

    def report(self, view: Sequence[Message], tokens: int) -> SegmentReport:
        """Where this prompt stands, as far as it is known before it is sent."""
        place = self._place(view)
        return SegmentReport(place.starts, place.first_prompt_tokens(tokens), place.conditional)

    # What the flow tells.

    def answered(self, answer: Answer | None, fit: Fit, tell: Callable[[Place, int, int], None]) -> None:
        """The call was answered; ``tell`` is called with its place, its row's number and its prompt's size.

        A stream brings its ids while the caller reads it, after the call has taken its place by our own.
        """
        sent = fit.report.sent
        counted = self._ids_of(sent)
        tokens = fit.report.tokens_after
        call = SegmentCall(sent, 0, counted)

        def place_by(ids: TokenIds | None) -> tuple[Place, int]:
            prompt_ids = None if ids is None else ids.prompt
            if ids is None or prompt_ids is None or ids.generated is None:
                place = self._place(sent)
            else:
                place = self._opened.place(sent, prompt_ids)
                call.ids = [*prompt_ids, *ids.generated]
            size = tokens if prompt_ids is None else len(prompt_ids)
            call.first_prompt_tokens = place.first_prompt_tokens(size)
            return place, size

        place, size = place_by(answer.token_ids if answer is not None else None)
        row = self._segments.end(self._opened, call, place)
        tell(place, row, size)
        if answer is None or answer.token_ids is None:
            self._segments.doubt(NO_IDS_FROM_SERVER)
            return

        def complete(ids: TokenIds) -> None:
            place_by(ids)
            self._segments.doubt(self._doubts(ids, counted, fit))

        answer.token_ids.then(complete)

    def close(self) -> None:
        """The call is over, answered or not."""
        self._segments.abandon(self._opened)

    def _doubts(self, ids: TokenIds, counted: Sequence[int] | None, fit: Fit) -> str:
        """Why the place of an answered call, or that of the next one, is not certain."""
        if ids.prompt is None or ids.generated is None:
            return NO_IDS_FROM_SERVER
        if counted is None:
            return NO_IDS_FROM_COUNTER
        if list(counted) != ids.prompt:
            return COUNT_DIFFERS
        return "" if fit.report.exact else COUNT_ESTIMATED

    def _place(self, view: Sequence[Message]) -> Place:
        return self._opened.place(view, self._ids_of(view))

    def _ids_of(self, view: Sequence[Message]) -> Sequence[int] | None:
        """Token ids of a prompt, None where the counter has none for it. Each view is tokenized once."""
        key = tuple(map(id, view))  # valid as long as the view is kept beside
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = (view, self._tokenized(view))
        return found[1]

    def _tokenized(self, view: Sequence[Message]) -> Sequence[int] | None:
        if not isinstance(self._counter, GivesTokenIds) or has_media(view):
            return None
        try:
            return self._counter.ids(view, tools=self._tools, template_kwargs=self._template_kwargs)
        except TemplateRefusedError:
            return None
