"""The manager: makes a history fit, the same way every time (see `ctxguard.manager.fold`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from ctxguard.budget import ContextBudget
from ctxguard.compaction import CompactionStrategy, default_strategies
from ctxguard.effects import Effect, Flow, Load, ModelCall, ModelText, Store, run_flow
from ctxguard.errors import BudgetError, ConfigurationError, ContextOverflowError
from ctxguard.history import UNTOUCHED, Digester, Ledger
from ctxguard.manager.fold import Fold, Rows, Settings
from ctxguard.manager.pins import Pins
from ctxguard.manager.report import Fit, FitReport, Limits, Path
from ctxguard.messages import (
    Message,
    Turn,
    as_messages,
    check_messages,
    first_task,
    group_turns,
    mend_messages,
)
from ctxguard.tokens.base import TokenCounter, Tool
from ctxguard.tokens.media import has_media

Mode = Literal["enforce", "observe", "off"]
Ask = Callable[[ModelCall], ModelText]


class HistoryManager:
    """Fits message histories into a budget. Stateless but for its ledger; safe to share.

    Args:
        counter: counts prompts.
        budget: the budget; may be given per call instead.
        strategies: from cheap to costly; None takes `default_strategies`.
        pin: turns for which this is true are kept as they are.
        pin_tools: names of tools whose turns are kept as they are.
        mend: repair what the caller's list breaks (see `mend_messages`); reported, never silent.
        ledger: shared or bounded otherwise; None makes one.

    Example:
        >>> from ctxguard import ApproximateCounter, ContextBudget, HistoryManager
        >>> manager = HistoryManager(ApproximateCounter(), ContextBudget(window=4096))
        >>> fit = manager.fit([{"role": "user", "content": "hello"}])
        >>> fit.report.path
        'untouched'
    """

    def __init__(
        self,
        counter: TokenCounter,
        budget: ContextBudget | None = None,
        *,
        strategies: Sequence[CompactionStrategy] | None = None,
        pin: Callable[[Turn], bool] | None = None,
        pin_tools: Collection[str] = (),
        mend: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.counter = counter
        self.budget = budget
        self.strategies = tuple(default_strategies() if strategies is None else strategies)
        for strategy in self.strategies:
            if not isinstance(strategy, CompactionStrategy):
                raise ConfigurationError(
                    f"strategies must be CompactionStrategy objects, got {strategy!r:.80}; "
                    "pass an instance, e.g. DropOldestTurns()"
                )
        self.pins = Pins(pin, frozenset(pin_tools))
        self.mend = mend
        self.ledger = Ledger() if ledger is None else ledger
        self._digester = Digester()

    def fit(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        output_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        budget: ContextBudget | None = None,
        ask: Ask | None = None,
    ) -> Fit:
        """Make a history fit. The caller's list and dicts are never changed.

        Args:
            messages: the whole history, OpenAI form.
            tools: tool schemas that go with it.
            output_tokens: the request's own output limit; None takes the budget's reserve.
            template_kwargs: the request's ``chat_template_kwargs``.
            budget: overrides the manager's budget.
            ask: answers the requests of strategies that ask a model; without it they are refused.

        Raises:
            InvalidMessagesError: not a list of mappings with a role.
            BudgetError: the budget leaves no room for a prompt.
            ContextOverflowError: what must be kept does not fit.
        """
        flow = self.fit_flow(
            messages, tools, output_tokens=output_tokens, template_kwargs=template_kwargs, budget=budget
        )
        return run_offline(flow, self.ledger, ask)

    def limits(self, budget: ContextBudget, output_tokens: int | None) -> Limits:
        """The limits for a call with this output limit (None: the budget's reserve)."""
        prompt = int(budget.prompt_limit(output_tokens) / (1 + self.counter.margin))
        return Limits(
            prompt=prompt,
            high=int(prompt * budget.high_mark),
            low=int(prompt * budget.low_mark),
            output=budget.reserve_for(output_tokens),
            window=budget.window,
        )

    def fit_flow(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        output_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        budget: ContextBudget | None = None,
        prompt_limit: int | None = None,
        model: str = "",
        observe: bool = False,
        rows: Rows | None = None,
    ) -> Flow[Fit]:
        """As `fit`, as a flow: yields `ModelCall`, `Load` and `Store`, returns the `Fit`.

        ``prompt_limit`` (tokens) lowers the limit further, after a refusal by the server. With ``observe``
        the messages come back as they are, whatever their size, and no model is asked. ``rows`` (level
        "trajectory") knows the limit of a prompt that goes on from the call before.
        """
        budget = budget or self.budget
        if budget is None:
            raise ConfigurationError("no budget: give the manager or fit() a ContextBudget(window=…)")
        limits = self.limits(budget, output_tokens)
        if limits.prompt < 1:
            raise BudgetError(
                f"an output limit of {limits.output} tokens leaves no room for a prompt in a window of "
                f"{budget.window}: lower it, or raise the window",
                field="output_tokens",
                value=limits.output,
                limit=budget.window - 1,
            )
        if prompt_limit is not None:
            limits = limits.lowered(prompt_limit)
        plain = as_messages(messages)
        broken = check_messages(plain)
        mended, mendings = mend_messages(plain) if self.mend and broken else (plain, [])
        settings = Settings(self.counter, self.strategies, self.pins, self.ledger, self._digester)
        fold = Fold(
            settings, mended, tools, template_kwargs, limits, model, may_ask_model=not observe, rows=rows
        )
        view, recipe = yield from fold.run()
        capped = fold.base is not mended
        touched = bool(mendings) or capped or recipe is not UNTOUCHED
        sent = plain if observe else view
        tokens = fold.measure.tokens(sent)
        limits = fold.limits_of(sent)
        if tokens > limits.prompt and not observe:
            raise self._cannot_fit(fold, limits, view, tokens, budget)
        path: Path = "compacted" if fold.is_new else "known" if touched else "untouched"
        report = FitReport(
            path="observed" if observe else path,
            limits=limits,
            tokens_before=fold.tokens_before if fold.is_new else tokens,
            tokens_after=tokens,
            exact=self.counter.exact and not fold.measure.is_refused(sent) and not has_media(sent),
            history=len(plain),
            steps=tuple(fold.steps if fold.is_new else fold.failed_steps),
            dropped=recipe.dropped,
            altered=recipe.altered,
            broken_rule=broken,
            mendings=tuple(mendings),
            recomputed=fold.recomputed,
            sent_digest=self._digester.chain(sent, b"")[-1].hex(),
            segment=rows.report(sent, tokens) if rows is not None else None,
            sent=sent,
        )
        return Fit(view if touched and not observe else messages, report)

    def _cannot_fit(
        self, fold: Fold, limits: Limits, view: Sequence[Message], tokens: int, budget: ContextBudget
    ) -> ContextOverflowError:
        turns = self.pins.mark(group_turns(view))
        cost = fold.measure.cost
        task = first_task(turns)
        parts = {
            "system": sum(map(cost, fold.measure.lead)),
            "tools": fold.measure.tools_tokens(),
            "task": sum(map(cost, turns[task].messages)) if task is not None else 0,
            "newest turn": sum(cost(m) for t in turns if t.newest and not t.pinned for m in t.messages),
        }
        tools = fold.measure.tool_sizes()[:5]
        row = ""
        if budget.level == "trajectory":
            row = (
                f" The trainer's row leaves that much: its first prompt may have {budget.max_prompt_tokens} "
                f"tokens, everything behind it {budget.max_response_tokens}."
            )
        largest = "; largest tool schemas: " + ", ".join(f"{n} ({t})" for n, t in tools) if tools else ""
        return ContextOverflowError(
            f"This model's maximum context length is {limits.window} tokens. The prompt cannot be made to "
            f"fit: it needs {tokens} tokens at the least, and the limit is {limits.prompt} (with "
            f"{limits.output} reserved for the response). About: "
            + ", ".join(f"{name} {size}" for name, size in parts.items())
            + largest
            + "."
            + row
            + " Raise the window, reserve less for the response, or shorten what cannot be removed.",
            reason="cannot_fit",
            prompt_tokens=tokens,
            limit=limits.prompt,
            window=limits.window,
            output_tokens=limits.output,
            exact=self.counter.exact,
            attempts=0,
            parts=parts,
            largest_tools=tools,
        )


def run_offline(flow: Flow[Fit], ledger: Ledger, ask: Ask | None) -> Fit:
    """Run a fit without a client: summaries come from the ledger and from ``ask``."""

    def perform(effect: Effect) -> Any:
        if isinstance(effect, Load):
            return ledger.summary(effect.key)
        if isinstance(effect, Store):
            return ledger.put_summary(effect.key, effect.text)
        if isinstance(effect, ModelCall) and ask is not None:
            return ask(effect)
        raise ConfigurationError(
            f"a strategy asked for {type(effect).__name__}, but this fit has no model to ask; pass ask=…"
        )

    return run_flow(flow, perform)
