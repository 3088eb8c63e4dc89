"""How one call travels: fit, send, and recover when the server still refuses.

A generator without I/O (see `ctxguard.effects`). It ends in the provider's answer, in the provider's
own error where that is not about length, or in `ContextOverflowError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ctxguard.budget import ContextBudget
from ctxguard.client.overflow import Classification, RequestFacts, classify, facts_of
from ctxguard.client.rows import CallRows
from ctxguard.effects import Answer, Flow, Send
from ctxguard.errors import BudgetError, ConfigurationError, ContextOverflowError
from ctxguard.events import (
    Answered,
    Compacted,
    Counted,
    Event,
    Failed,
    FieldAdded,
    OutputLimited,
    Placed,
    Refused,
)
from ctxguard.manager import Fit, HistoryManager
from ctxguard.messages import Message
from ctxguard.scope import RolloutScope
from ctxguard.segments import CALL_UNSEEN, Place
from ctxguard.tokens.base import Tool

if TYPE_CHECKING:
    from ctxguard.client.guard import Guard

BLIND_SHRINK = 0.8
"""Share of the refused prompt that the next try may have when the server's numbers do not help."""

NOISE = 0.95
"""A retry is at most this share of what was refused, so that tries cannot crawl."""


@dataclass(frozen=True)
class Call:
    """One chat completion request, in the terms of this library.

    Attributes:
        messages, tools: as the request carries them.
        model: model name.
        output_limit: ``(field, tokens)`` that the request carries, e.g. ``("max_tokens", 512)``, or None.
        template_kwargs: what the request passes to the chat template.
        return_token_ids: the request's field of that name, None where it has none.
        base_url: the client's base URL, rollout path included.
        server: the same without the rollout path; limits are learnt per server and model.
        scope: the rollout it belongs to, None outside of one.
    """

    messages: Sequence[Message]
    model: str
    tools: Sequence[Tool] | None = None
    output_limit: tuple[str, int] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    return_token_ids: bool | None = None
    base_url: str = ""
    server: str = ""
    scope: RolloutScope | None = None


def guarded_call(guard: Guard, call: Call) -> Flow[Any]:
    """Carry one call through. Returns the provider's answer.

    Raises:
        ContextOverflowError: it cannot be made to fit, or is refused whatever is permitted to be tried.
        CtxguardError: a configuration error of ours (unknown window, contradictory budget, a budget of level
            "trajectory" outside of a rollout or without an output limit, …).
        Exception: the provider's own errors that are not about length, untouched.
    """
    mode = guard.effective_mode
    if mode == "off":
        guard.begin_call(call.scope)
        answer: Answer = yield Send(None)
        if call.scope is not None:
            call.scope.answered()
            call.scope.segments.forget(CALL_UNSEEN)
        return answer.value
    manager = guard.manager_for(call.model)
    budget = yield from guard.budget_for(call)
    run = _Run(guard, call, manager, budget)
    try:
        return (yield from (run.observe() if mode == "observe" else run.enforce()))
    finally:
        run.close()


class _Run:
    """One call on its way."""

    def __init__(self, guard: Guard, call: Call, manager: HistoryManager, budget: ContextBudget) -> None:
        self.guard = guard
        self.call = call
        self.manager = manager
        self.budget = budget
        self.number = guard.begin_call(call.scope)
        self.attempts = 0
        self.sent_output = call.output_limit[1] if call.output_limit else None
        self.prompt_limit = guard.learnt_prompt_limit(call.server, call.model)
        self.undercounted = False
        self.rows: CallRows | None = None
        if budget.level == "trajectory":
            if call.scope is None:
                raise ConfigurationError(
                    'a budget of level="trajectory" counts what the calls of a rollout have in a row, and '
                    "this call belongs to no rollout: call inside guarded_rollout(…) or "
                    "`with guard.scope(…)`, or through a base URL with /rollout/<id>"
                )
            self.rows = CallRows(call.scope.segments, manager.counter, call.tools, call.template_kwargs)

    def close(self) -> None:
        """The call is over, however it ended."""
        if self.rows is not None:
            self.rows.close()

    def enforce(self) -> Flow[Any]:
        error: Exception | None = None
        verdict: Classification | None = None
        while True:
            fit = yield from self._fit(refused=verdict is not None, cause=error)
            output = self._output_limit(fit)
            asks = yield from self._asks_for_ids()
            self._tell_fit(fit, refused=verdict is not None)
            changed = fit.messages is not self.call.messages
            self.attempts += 1
            answer, error = yield from self._send(fit.messages if changed else None, output, asks=asks)
            verdict = self._verdict(answer, error, fit)
            if verdict is None:
                if error is not None:
                    raise error
                self._tell_answer(answer, fit)
                if self.undercounted and self.prompt_limit is not None:
                    self.guard.learn_prompt_limit(self.call.server, self.call.model, self.prompt_limit)
                return answer.value if answer is not None else None
            self._learn(verdict, error, fit)
            if self.attempts >= self.guard.max_attempts:
                self._fail(self._refused(verdict, fit), error)

    def observe(self) -> Flow[Any]:
        requested = self.call.output_limit[1] if self.call.output_limit else None
        room = requested is None or requested < self.budget.window
        fit = yield from self._fit_flow(requested if room else None, observe=True)
        self._tell_fit(fit, refused=False)
        self.attempts = 1
        answer, refusal = yield from self._send(None, None)
        verdict = self._verdict(answer, refusal, fit)
        if verdict is not None:
            self._learn(verdict, refusal, fit)
            if self.call.scope is not None:
                self.call.scope.latch(self._refused(verdict, fit))
        if refusal is not None:
            raise refusal
        if verdict is None:
            self._tell_answer(answer, fit)
        return answer.value if answer is not None else None

    def _fit(self, *, refused: bool, cause: Exception | None) -> Flow[Fit]:
        """Fit the history; what cannot fit fails the call."""
        try:
            return (yield from self._fit_flow(self._reserve()))
        except ContextOverflowError as error:
            error.attempts = self.attempts
            if refused:
                error.reason = "refused"
            failure = error
        self._fail(failure, cause)

    def _fit_flow(self, output_tokens: int | None, *, observe: bool = False) -> Flow[Fit]:
        if self.rows is not None:
            self.rows.hold(self.budget, self.budget.reserve_for(output_tokens), self.prompt_limit)
        return self.manager.fit_flow(
            self.call.messages,
            self.call.tools,
            output_tokens=output_tokens,
            template_kwargs=self.call.template_kwargs,
            budget=self.budget,
            prompt_limit=self.prompt_limit,
            model=self.call.model,
            observe=observe,
            rows=self.rows,
        )

    def _reserve(self) -> int | None:
        """Tokens to reserve for the response: the request's own limit, unless we may lower that."""
        if self.call.output_limit is None:
            self._refuse_open_end()
            return None
        name, requested = self.call.output_limit
        in_row = self.budget.max_response_tokens if self.rows is not None else None
        if self.guard.response == "enforce":
            return max(1, min(requested, self.budget.response_reserve if in_row is None else in_row))
        if in_row is not None and requested > in_row:
            raise ContextOverflowError(
                f"{name}={requested} is more than the {in_row} tokens that the trainer's row has behind its "
                f'first prompt (max_response_tokens at level="trajectory"). Set {name} to less, so that a '
                'row holds more than one answer, or let the guard lower it with response="enforce"',
                reason="output_budget",
                window=self.budget.window,
                limit=in_row,
                output_tokens=requested,
            )
        if 1 <= requested < self.budget.window:
            return requested
        raise ContextOverflowError(
            f"This model's maximum context length is {self.budget.window} tokens. {name}={requested} leaves "
            "no room for a prompt: it must be at least 1 and below that. Correct it, leave it out, or let "
            'the guard set it with response="enforce"',
            reason="output_budget",
            window=self.budget.window,
            limit=max(0, self.budget.window - max(requested, 1)),
            output_tokens=requested,
        )

    def _refuse_open_end(self) -> None:
        """In a row that holds several answers, one without a limit could take all that the row has."""
        if self.rows is not None and self.guard.response != "enforce":
            raise BudgetError(
                'a budget of level="trajectory" needs an output limit on every request, and this one has '
                f"none: set max_tokens (the trainer's row has {self.budget.max_response_tokens} tokens "
                "behind its first prompt, for all answers and observations), or let the guard set it with "
                'response="enforce"',
                field="max_tokens",
                value=None,
                limit=self.budget.max_response_tokens,
            )

    def _asks_for_ids(self) -> Flow[bool]:
        """Whether to add ``return_token_ids`` to the request; said in an event, since the caller did not."""
        if self.rows is None or self.call.return_token_ids is not None:
            return False
        if not (yield from self.guard.takes_return_token_ids(self.call)):
            return False
        event = FieldAdded(
            **self._ids(),
            field="return_token_ids",
            value=True,
            reason='level="trajectory": which calls share a row is told by token ids',
        )
        self.guard.emit(event, self.call.scope)
        return True

    def _output_limit(self, fit: Fit) -> tuple[str, int] | None:
        """The output limit to set, None to leave the request's own."""
        if self.guard.response != "enforce":
            return None
        name, requested = self.call.output_limit or ("max_tokens", None)
        room = self.budget.window - fit.report.tokens_after
        wanted = self.budget.response_reserve if requested is None else requested
        if self.budget.max_response_tokens is not None:
            wanted = min(wanted, self.budget.max_response_tokens)
        allowed = max(1, min(wanted, room))
        if allowed == requested:
            return None
        event = OutputLimited(**self._ids(), field=name, before=requested, after=allowed)
        self.guard.emit(event, self.call.scope)
        self.sent_output = allowed
        return name, allowed

    def _send(
        self, messages: Sequence[Message] | None, output: tuple[str, int] | None, *, asks: bool = False
    ) -> Flow[tuple[Answer | None, Exception | None]]:
        token_ids: Literal["read", "ask"] | None = None
        if self.rows is not None:
            token_ids = "ask" if asks else "read"
        try:
            answer: Answer = yield Send(messages, output, token_ids)
        except Exception as error:  # looked at by _verdict; what is not overflow is raised again
            return None, error
        return answer, None

    def _verdict(self, answer: Answer | None, error: Exception | None, fit: Fit) -> Classification | None:
        """What the server refused, None where this is an answer or an error that is none of our business."""
        facts = RequestFacts(
            prompt_tokens=fit.report.tokens_after,
            exact=fit.report.exact,
            max_output_tokens=self.sent_output,
            window=self.budget.window,
            compacted=fit.messages is not self.call.messages,
        )
        if error is not None:
            status, headers, body = facts_of(error)
            verdict = classify(status=status, headers=headers, body=body, request=facts)
        elif answer is not None and answer.error_body is not None:
            verdict = classify(status=200, body=answer.error_body, request=facts)
        else:
            return None
        return verdict if verdict.is_overflow else None

    def _learn(self, verdict: Classification, error: Exception | None, fit: Fit) -> None:
        """Take from a refusal what it teaches, and set the limit of the next try."""
        limit = verdict.learnt_limit
        learnt = limit is not None and self.guard.learn(self.call.server, self.call.model, limit, self.budget)
        sent = fit.report.tokens_after
        event = Refused(
            **self._ids(),
            refusal=str(verdict.kind.value),
            status=facts_of(error)[0] if error is not None else 200,
            prompt_tokens=sent,
            limit=limit,
            learnt=learnt,
            evidence=verdict.evidence,
        )
        self.guard.emit(event, self.call.scope)
        permitted = sent * BLIND_SHRINK
        if learnt and limit is not None:
            self.budget = self.budget.with_window(limit, source="learnt")
            permitted = sent * NOISE
        real = verdict.measured_prompt_tokens
        if real is not None and real > sent > 0:
            # The server counts more than we do: scale our limit by the same share.
            permitted = min(permitted, fit.report.limits.prompt * sent / real)
            self.undercounted = True
        self.undercounted = self.undercounted or not learnt
        self.prompt_limit = max(1, int(permitted))

    def _refused(self, verdict: Classification, fit: Fit) -> ContextOverflowError:
        real = verdict.measured_prompt_tokens
        window = verdict.learnt_limit or self.budget.window
        ours = fit.report.tokens_after
        limit = fit.report.limits.prompt
        return ContextOverflowError(
            f"This model's maximum context length is {window} tokens. The server refused {self.attempts} "
            f"request(s) as too long; the last prompt had {real or ours} tokens. "
            "Check the window and the tokenizer that the guard was given against the server's.",
            reason="refused",
            prompt_tokens=real or ours,
            limit=limit,
            window=window,
            output_tokens=fit.report.limits.output,
            exact=fit.report.exact,
            attempts=self.attempts,
            report=fit.report,
        )

    def _fail(self, failure: ContextOverflowError, cause: Exception | None) -> NoReturn:
        if self.call.scope is not None:
            self.call.scope.latch(failure)
        self.guard.emit(Failed(**self._ids(), **_failure_facts(failure)), self.call.scope)
        raise failure from cause

    def _ids(self) -> dict[str, Any]:
        scope = self.call.scope
        return {
            "model": self.call.model,
            "rollout_id": scope.rollout_id if scope else None,
            "attempt_id": scope.attempt_id if scope else None,
            "call": self.number,
        }

    def _tell_fit(self, fit: Fit, *, refused: bool) -> None:
        report = fit.report
        events: list[Event] = []
        if report.path == "compacted":
            events.append(
                Compacted(
                    **self._ids(),
                    tokens_before=report.tokens_before,
                    tokens_after=report.tokens_after,
                    dropped=report.dropped,
                    altered=report.altered,
                    strategies=tuple((s.name, s.tokens_before - s.tokens_after) for s in report.steps),
                    reason="refused" if refused else "high_mark",
                )
            )
        events.append(
            Counted(
                **self._ids(),
                prompt_tokens=report.tokens_after,
                prompt_limit=report.limits.prompt,
                output_tokens=report.limits.output,
                exact=report.exact,
                path=report.path,
                messages=len(report.sent),
                history=report.history,
                digest=report.sent_digest,
            )
        )
        for event in events:
            self.guard.emit(event, self.call.scope)
        self.guard.report(report)

    def _tell_answer(self, answer: Answer | None, fit: Fit) -> None:
        event = Answered(
            **self._ids(),
            predicted_tokens=fit.report.tokens_after,
            served_tokens=answer.prompt_tokens if answer else None,
            completion_tokens=answer.completion_tokens if answer else None,
            exact=fit.report.exact,
            attempts=self.attempts,
        )
        self.guard.emit(event, self.call.scope)
        if event.exact and event.served_tokens not in (None, event.predicted_tokens):
            self.guard.warn_of_mismatch(self.call, event)
        if self.rows is not None:
            self.rows.answered(answer, fit, lambda *where: self._tell_place(fit, *where))

    def _tell_place(self, fit: Fit, place: Place, row: int, prompt_tokens: int) -> None:
        event = Placed(
            **self._ids(),
            row=row,
            starts=place.starts,
            prompt_tokens=prompt_tokens,
            first_prompt_tokens=place.first_prompt_tokens(prompt_tokens),
            row_limit=fit.report.limits.prompt,
            conditional=place.conditional,
        )
        self.guard.emit(event, self.call.scope)


def _failure_facts(error: ContextOverflowError) -> dict[str, Any]:
    return {
        "reason": error.reason,
        "prompt_tokens": error.prompt_tokens,
        "limit": error.limit,
        "window": error.window,
        "attempts": error.attempts,
    }
