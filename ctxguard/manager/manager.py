"""The manager: makes a history fit, the same way every time.

The view of a history is a pure function of it, the *fold*. The history is walked along the points at
which an agent called the model (before each assistant message, and at its end). At each of them the
recipe so far is applied; where the result is over the high mark, the strategies run, and their result
is the new recipe. The ledger remembers the recipe at each point, so a live agent pays for one step a
call, and a lost ledger costs time but changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ctxguard.budget import ContextBudget
from ctxguard.compaction import CompactionContext, CompactionStrategy, default_strategies
from ctxguard.effects import Effect, Flow, Load, ModelCall, ModelText, Store, run_flow
from ctxguard.errors import BudgetError, ConfigurationError, ContextOverflowError, StrategyError
from ctxguard.history import UNTOUCHED, Digester, Ledger, Recipe, digest
from ctxguard.manager.measure import Measure
from ctxguard.manager.report import Fit, FitReport, Limits, StrategyStep
from ctxguard.messages import (
    Message,
    Turn,
    as_messages,
    check_messages,
    first_task,
    flatten_turns,
    group_turns,
    is_text_result,
    lead_length,
    mend_messages,
    newest_turn,
)
from ctxguard.messages.turns import RESULT_ROLES
from ctxguard.tokens.base import TokenCounter, Tool

Mode = Literal["enforce", "observe", "off"]
Ask = Callable[[ModelCall], ModelText]

MAX_PASSES = 4


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
        self.pin = pin
        self.pin_tools = frozenset(pin_tools)
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
        reserve = budget.response_reserve if output_tokens is None else output_tokens
        prompt = int(budget.prompt_limit(output_tokens) / (1 + self.counter.margin))
        return Limits(
            prompt=prompt,
            high=int(prompt * budget.high_mark),
            low=int(prompt * budget.low_mark),
            output=reserve,
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
    ) -> Flow[Fit]:
        """As `fit`, as a flow: yields `ModelCall`, `Load` and `Store`, returns the `Fit`.

        ``prompt_limit`` (tokens) lowers the limit further, after a refusal by the server.
        """
        budget = budget or self.budget
        if budget is None:
            raise ConfigurationError("no budget: give the manager or fit() a ContextBudget(window=…)")
        limits = self.limits(budget, output_tokens)
        if limits.prompt < 1:
            raise BudgetError(
                f"an output limit of {limits.output} tokens leaves no room for a prompt in a window of "
                f"{budget.window}: lower it, or raise the window"
            )
        if prompt_limit is not None and prompt_limit < limits.prompt:
            share = prompt_limit / limits.prompt
            limits = replace(
                limits, prompt=prompt_limit, high=int(limits.high * share), low=int(limits.low * share)
            )
        plain = as_messages(messages)
        broken = check_messages(plain)
        mended, mendings = mend_messages(plain) if self.mend and broken else (plain, [])
        fold = _Fold(self, mended, tools, template_kwargs, limits, model)
        view, recipe = yield from fold.run()
        capped = fold.base is not mended
        touched = bool(mendings) or capped or recipe is not UNTOUCHED
        tokens = fold.measure.tokens(view)
        if tokens > limits.prompt:
            raise self._cannot_fit(fold, view, tokens)
        report = FitReport(
            path="compacted" if fold.is_new else "known" if touched else "untouched",
            limits=limits,
            tokens_before=fold.tokens_before if fold.is_new else tokens,
            tokens_after=tokens,
            exact=self.counter.exact and not fold.measure.is_refused(view),
            history=len(plain),
            steps=tuple(fold.steps if fold.is_new else fold.failed_steps),
            dropped=recipe.dropped,
            altered=recipe.altered,
            broken_rule=broken,
            mendings=tuple(mendings),
            recomputed=fold.recomputed,
            sent_digest=self._digester.chain(view, b"")[-1].hex() if view else "",
            sent=view,
        )
        return Fit(view if touched else messages, report)

    def mark(self, turns: Sequence[Turn]) -> list[Turn]:
        """Say of each turn whether it is pinned and whether it belongs to the newest."""
        task = first_task(turns)
        newest = newest_turn(turns)
        lead = next((i for i, turn in enumerate(turns) if turn.kind != "system"), len(turns))
        system = next((i for i, turn in enumerate(turns) if turn.kind == "system"), None)
        marked = []
        for position, turn in enumerate(turns):
            pinned = (
                position < lead
                or position == system
                or (task is not None and position <= task)
                or not self.pin_tools.isdisjoint(turn.tool_names)
                or (self.pin is not None and self.pin(turn))
            )
            marked.append(replace(turn, pinned=pinned, newest=newest is not None and position >= newest))
        return marked

    def _cannot_fit(self, fold: _Fold, view: Sequence[Message], tokens: int) -> ContextOverflowError:
        turns = self.mark(group_turns(view))
        cost = fold.measure.cost
        task = first_task(turns)
        parts = {
            "system": sum(map(cost, fold.measure.lead)),
            "tools": fold.measure.tools_tokens(),
            "task": sum(map(cost, turns[task].messages)) if task is not None else 0,
            "newest turn": sum(cost(m) for t in turns if t.newest and not t.pinned for m in t.messages),
        }
        tools = fold.measure.tool_sizes()[:5]
        limits = fold.limits
        largest = "; largest tool schemas: " + ", ".join(f"{n} ({t})" for n, t in tools) if tools else ""
        return ContextOverflowError(
            f"The prompt cannot be made to fit the model's maximum context length of {limits.window} tokens: "
            f"it needs {tokens} tokens at the least, and the limit is {limits.prompt} (with {limits.output} "
            f"reserved for the response). About: "
            + ", ".join(f"{name} {size}" for name, size in parts.items())
            + largest
            + ". Raise the window, reserve less for the response, or shorten what cannot be removed.",
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


class _Fold:
    """One walk along one history."""

    def __init__(
        self,
        manager: HistoryManager,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, Any] | None,
        limits: Limits,
        model: str,
    ) -> None:
        self.manager = manager
        self.limits = limits
        self.messages = messages
        self.measure = Measure(manager.counter, tools, template_kwargs, messages)
        self.steps: list[StrategyStep] = []
        self.failed_steps: list[StrategyStep] = []
        self.tokens_before = 0
        self.is_new = False
        self.recomputed = 0
        self.base = self._on_first_sight(messages)
        lead = len(self.measure.lead)
        seed = digest(
            model.encode(),
            manager.counter.fingerprint.encode(),
            repr((limits, manager.strategies, manager.pin, sorted(manager.pin_tools))).encode(),
            repr((lead, self.measure.lead_step)).encode(),
            repr((tools, sorted((template_kwargs or {}).items()))).encode("utf-8", "surrogatepass"),
        )
        # The lead is not in the chain: what it says changes no decision (see Measure).
        self._chain = [seed] * lead + manager._digester.chain(messages[lead:], seed)

    def run(self) -> Flow[tuple[Sequence[Message], Recipe]]:
        """The view of the whole history and its recipe."""
        ends = call_points(self.messages)
        known = self.manager.ledger.longest(self._chain, ends)
        position, recipe = (-1, UNTOUCHED) if known is None else known
        for end in ends[position + 1 :]:
            is_last = end == ends[-1]
            recipe = yield from self._step(recipe, end, is_last)
            self.recomputed += not is_last and known is None
            self.manager.ledger.put(self._chain[end], recipe)
        view, origins = recipe.apply(self.base)
        tokens = self.measure.tokens(view)
        if tokens > self.limits.prompt:
            # What stands behind the last point (a reminder, a note) is too much, or the lead's rounding.
            compacted = yield from self._compact(view, origins, self.base, self.measure.tokens, is_last=True)
            if compacted is not None:
                recipe = compacted
                view, _ = recipe.apply(self.base)
        if self.steps:
            # An agent's note at the end of its last call makes this call compute the same recipe again.
            key = digest(self._chain[recipe.covers], repr(recipe).encode("utf-8", "surrogatepass"))
            self.is_new = self.manager.ledger.announce(key)
        return (self.messages if recipe is UNTOUCHED and self.base is self.messages else view), recipe

    def _step(self, recipe: Recipe, end: int, is_last: bool) -> Flow[Recipe]:
        history = self.base[:end]
        view, origins = recipe.apply(history)
        high = self.limits.high
        if self.measure.head + sum(map(self.measure.cost, view[len(self.measure.lead) :])) <= high:
            return recipe
        if self.measure.decision(view) <= high:
            return recipe
        compacted = yield from self._compact(view, origins, history, self.measure.decision, is_last=is_last)
        # What does not fit is not kept: the same history is compacted anew when it comes again.
        if compacted is None or self.measure.decision(compacted.apply(history)[0]) > self.limits.prompt:
            return recipe
        return compacted

    def _compact(
        self,
        view: Sequence[Message],
        origins: Sequence[int | None],
        history: Sequence[Message],
        size: Callable[[Sequence[Message]], int],
        *,
        is_last: bool,
    ) -> Flow[Recipe | None]:
        """Run the strategies over a view. None where they could make nothing smaller."""
        turns: Sequence[Turn] = self.manager.mark(group_turns(view, origins))
        before = tokens = size(view)
        steps: list[StrategyStep] = []
        refused = self.measure.is_refused(view)
        for _ in range(MAX_PASSES):
            at_start = tokens
            for strategy in self.manager.strategies:
                need = tokens - self._target(strategy, turns)
                if strategy.on_first_sight or need <= 0:
                    continue
                context = CompactionContext(
                    need=-(-need // self.limits.grain) * self.limits.grain,
                    prompt_limit=self.limits.prompt,
                    counter=self.manager.counter,
                    count=lambda turns: size(flatten_turns(turns)),
                    is_refused=lambda turns: not refused and self.measure.is_refused(flatten_turns(turns)),
                    may_ask_model=is_last,
                )
                result = yield from strategy.compact_flow(turns, context)
                if context.is_deferred:
                    return None
                _check_strategy(strategy, turns, result)
                after = size(flatten_turns(result))
                if after < tokens:
                    steps.append(StrategyStep(strategy.name, tokens, after, tuple(context.notes)))
                    turns, tokens = result, after
                elif context.notes:
                    steps.append(StrategyStep(strategy.name, tokens, tokens, tuple(context.notes)))
            if tokens <= self.limits.high or tokens == at_start:
                break
        if tokens >= before:
            self.failed_steps = steps
            return None
        self.steps, self.tokens_before = steps, before
        return Recipe.of(turns, history)

    def _target(self, strategy: CompactionStrategy, turns: Sequence[Turn]) -> int:
        """Tokens down to which a strategy is to go.

        The low mark; but where system, task, tools and newest turn are large themselves, half of what
        they leave free: dropping everything else would not make the next compaction come much later.
        """
        high = self.limits.high
        if strategy.target == "high":
            return high
        cost = self.measure.cost
        task = first_task(turns)
        pinned = sum(
            cost(m)
            for i, t in enumerate(turns)
            if t.pinned and i != task and t.kind != "system"
            for m in t.messages
        )
        newest = sum(cost(m) for turn in turns if turn.newest and not turn.pinned for m in turn.messages)
        fixed = self.measure.head + pinned + min(newest, high // 2)
        return min(high, max(self.limits.low, (fixed + high) // 2))

    def _on_first_sight(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The history with the strategies applied that run on first sight."""
        strategies = [s for s in self.manager.strategies if s.on_first_sight]
        if not strategies:
            return messages
        turns: Sequence[Turn] = self.manager.mark(group_turns(messages))
        for strategy in strategies:
            context = CompactionContext(
                need=0,
                prompt_limit=self.limits.prompt,
                counter=self.manager.counter,
                count=lambda turns: self.measure.tokens(flatten_turns(turns)),
                is_refused=lambda turns: self.measure.is_refused(flatten_turns(turns)),
                may_ask_model=False,
            )
            turns = strategy.compact(turns, context)
        base = flatten_turns(turns)
        if len(base) != len(messages):
            names = ", ".join(s.name for s in strategies)
            raise StrategyError(f"a strategy that runs on first sight must keep every message ({names})")
        unchanged = all(new is old for new, old in zip(base, messages, strict=True))
        return messages if unchanged else base


def call_points(messages: Sequence[Message]) -> list[int]:
    """Lengths of the history at which an agent called the model, ascending; the last is this call.

    That is before each assistant message, and at the end. User and system messages that stand behind
    tool results (reminders) are not counted in: agents add them for one call and take them away again.
    """
    lead = lead_length(messages)
    calls = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i > lead]
    return sorted({_durable(messages, end) for end in (*calls, len(messages))})


def _durable(messages: Sequence[Message], end: int) -> int:
    shorter = end
    while shorter > 0 and messages[shorter - 1].get("role") in ("user", "system", "developer"):
        if is_text_result(messages[shorter - 1]):
            break
        shorter -= 1
    if shorter > 0 and _is_result(messages[shorter - 1]):
        return shorter
    return end


def _is_result(message: Message) -> bool:
    return message.get("role") in RESULT_ROLES or is_text_result(message)


def _check_strategy(strategy: CompactionStrategy, before: Sequence[Turn], after: Sequence[Turn]) -> None:
    kept = {origin for turn in after for origin in turn.origins}
    for turn in before:
        if (turn.pinned or turn.newest) and any(o is not None and o not in kept for o in turn.origins):
            raise StrategyError(
                f"{strategy.name} left out a turn that must stay (messages {turn.origins}); "
                "a strategy may drop only turns that are neither pinned nor newest"
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
