"""The fold: the view of a history as a pure function of it.

The history is walked along the points at which an agent called the model (before each assistant message,
and at its end). At each of them the recipe so far is applied; where the result is over the high mark, the
strategies run, and their result is the new recipe. The ledger remembers the recipe at each point, so a live
agent pays for one step a call, and a lost ledger costs time but changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ctxguard.compaction import CompactionContext, CompactionStrategy
from ctxguard.effects import Flow
from ctxguard.errors import StrategyError
from ctxguard.history import UNTOUCHED, Digester, Known, Ledger, Recipe, digest
from ctxguard.manager.measure import Measure
from ctxguard.manager.pins import Pins
from ctxguard.manager.points import call_points, settled
from ctxguard.manager.report import Limits, StrategyStep
from ctxguard.messages import (
    Message,
    Turn,
    first_task,
    flatten_turns,
    group_turns,
)
from ctxguard.segments import SegmentReport
from ctxguard.tokens.base import TokenCounter, Tool

MAX_PASSES = 4


@dataclass(frozen=True)
class Settings:
    """What does not change between the histories that one manager folds."""

    counter: TokenCounter
    strategies: tuple[CompactionStrategy, ...]
    pins: Pins
    ledger: Ledger
    digester: Digester


class Rows(Protocol):
    """What bounds a prompt that goes on from the call before it, where a trainer merges the two."""

    def limit(self, view: Sequence[Message], first_prompt_limit: int) -> int | None:
        """The most tokens that this prompt may have; None where it starts a row, which the usual limit holds.

        Where it may do either, the lower one of both.
        """
        ...

    def report(self, view: Sequence[Message], tokens: int) -> SegmentReport:
        """Where this prompt stands."""
        ...


class Fold:
    """One walk along one history.

    Attributes:
        base: the history with the strategies applied that run on first sight.
        steps: strategies of the last compaction that was computed, in order.
        failed_steps: strategies that freed nothing but had something to say.
        tokens_before: size of the view before that compaction.
        is_new: whether that compaction was not known before.
        recomputed: earlier points that had to be walked again because nothing of this history was known.
    """

    def __init__(
        self,
        settings: Settings,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        template_kwargs: Mapping[str, Any] | None,
        limits: Limits,
        model: str,
        *,
        may_ask_model: bool = True,
        rows: Rows | None = None,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.rows = rows
        self.may_ask_model = may_ask_model
        self.messages = messages
        self.measure = Measure(settings.counter, tools, template_kwargs, messages)
        self.steps: list[StrategyStep] = []
        self.failed_steps: list[StrategyStep] = []
        self.tokens_before = 0
        self.is_new = False
        self.recomputed = 0
        self._last: tuple[Recipe, Sequence[Message], tuple[list[Message], list[int | None]]] | None = None
        self.base = self._on_first_sight(messages)
        lead = len(self.measure.lead)
        seed = digest(
            model.encode(),
            settings.counter.fingerprint.encode(),
            repr(
                (limits, settings.strategies, settings.pins.predicate, sorted(settings.pins.tools))
            ).encode(),
            repr((lead, self.measure.lead_step)).encode(),
            repr((tools, sorted((template_kwargs or {}).items()))).encode("utf-8", "surrogatepass"),
        )
        # The lead is not in the chain: what it says changes no decision (see Measure).
        self._chain = [seed] * lead + settings.digester.chain(settled(messages)[lead:], seed)

    def run(self) -> Flow[tuple[Sequence[Message], Recipe]]:
        """The view of the whole history and its recipe."""
        ends = call_points(self.messages)
        found = self.settings.ledger.longest(self._chain, ends)
        if found is None:
            position, known, start = -1, Known(UNTOUCHED, self.measure.head), len(self.measure.lead)
        else:
            position, known = found
            start = ends[position]
        for end in ends[position + 1 :]:
            is_last = end == ends[-1]
            limits, stays = self._limits_at_last(known.recipe) if is_last else (self.limits, False)
            known = yield from self._step(known, start, end, limits, stays=stays, is_last=is_last)
            start = end
            self.recomputed += not is_last and found is None
            self.settings.ledger.put(self._chain[end], known)
        recipe = known.recipe
        view, origins = self._view(recipe, self.base)
        limits = self.limits_of(view)
        if self.measure.tokens(view) > limits.prompt:
            # What stands behind the last point, or will not stay, is too much; or the lead's rounding was.
            limits = self.limits.lowered(limits.prompt)
            compacted = yield from self._compact(
                view, origins, self.base, limits, self.measure.tokens, is_last=True
            )
            if compacted is not None:
                recipe = compacted.recipe
                view, _ = self._view(recipe, self.base)
        if self.steps:
            # An agent's note at the end of its last call makes this call compute the same recipe again.
            key = digest(self._chain[recipe.covers], repr(recipe).encode("utf-8", "surrogatepass"))
            self.is_new = self.settings.ledger.announce(key)
        return (self.messages if recipe is UNTOUCHED and self.base is self.messages else view), recipe

    def limits_of(self, view: Sequence[Message]) -> Limits:
        """The limits of a prompt that is sent: its own prompt limit where it goes on from the call before."""
        limit = None if self.rows is None else self.rows.limit(view, self.limits.prompt)
        return self.limits if limit is None else replace(self.limits, prompt=limit)

    def _limits_at_last(self, recipe: Recipe) -> tuple[Limits, bool]:
        """What the last step is held to, and whether what is known of the history stays as it is.

        A prompt that goes on from the call before stays as long as the row has room for it. When it has
        none left, a compaction starts a new row: it goes down to the limits of a first prompt. Should its
        result still go on from the call before, it must fit the old row, too, so the lower limit holds.
        """
        view, _ = self._view(recipe, self.base)
        limit = None if self.rows is None else self.rows.limit(view, self.limits.prompt)
        if limit is None:
            return self.limits, False
        return self.limits.lowered(limit), self.measure.tokens(view) <= limit

    def _step(
        self, known: Known, start: int, end: int, limits: Limits, *, stays: bool, is_last: bool
    ) -> Flow[Known]:
        """From what is known at one point to what is known at the next.

        While the messages in between cannot have brought the view over the high mark they are only added
        up; else the view is counted. Either way the result depends on nothing but the history up to here
        (and, where a trainer merges calls, on whether the last call goes on from the one before).
        """
        bound = known.tokens + sum(map(self.measure.cost, self.base[start:end]))
        if stays or bound <= limits.high:
            return Known(known.recipe, bound)
        history = settled(self.base if end == len(self.base) else self.base[:end])
        view, origins = self._view(known.recipe, history)
        tokens = self.measure.decision(view)
        if tokens > limits.high:
            compacted = yield from self._compact(
                view, origins, history, limits, self.measure.decision, is_last=is_last
            )
            # What does not fit is not kept: the same history is compacted anew when it comes again.
            if compacted is not None and compacted.tokens <= self._most(compacted.recipe, limits):
                return compacted
        return Known(known.recipe, tokens)

    def _most(self, recipe: Recipe, limits: Limits) -> int:
        """The most tokens that the view of a new recipe may have."""
        if limits is self.limits:
            return limits.prompt
        return max(limits.prompt, self.limits_of(self._view(recipe, self.base)[0]).prompt)

    def _view(
        self, recipe: Recipe, history: Sequence[Message]
    ) -> tuple[Sequence[Message], Sequence[int | None]]:
        """The recipe applied to a history; the last one is remembered, so that it is counted once."""
        if self._last is None or self._last[0] is not recipe or self._last[1] is not history:
            self._last = (recipe, history, recipe.apply(history))
        return self._last[2]

    def _compact(
        self,
        view: Sequence[Message],
        origins: Sequence[int | None],
        history: Sequence[Message],
        limits: Limits,
        size: Callable[[Sequence[Message]], int],
        *,
        is_last: bool,
    ) -> Flow[Known | None]:
        """Run the strategies over a view. None where they could make nothing smaller."""
        turns: Sequence[Turn] = self.settings.pins.mark(group_turns(view, origins))
        before = tokens = size(view)
        steps: list[StrategyStep] = []
        refused = self.measure.is_refused(view)
        for _ in range(MAX_PASSES):
            at_start = tokens
            for strategy in self.settings.strategies:
                need = tokens - self._target(strategy, turns, limits)
                if strategy.on_first_sight or need <= 0:
                    continue
                context = CompactionContext(
                    need=-(-need // limits.grain) * limits.grain,
                    prompt_limit=limits.prompt,
                    counter=self.settings.counter,
                    count=lambda turns: size(flatten_turns(turns)),
                    cost=self._cost,
                    is_refused=lambda turns: not refused and self.measure.is_refused(flatten_turns(turns)),
                    may_ask_model=is_last and self.may_ask_model,
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
            if tokens <= limits.high or tokens == at_start:
                break
        if tokens >= before:
            self.failed_steps = steps
            return None
        self.steps, self.tokens_before = steps, before
        return Known(Recipe.of(turns, history), tokens)

    def _cost(self, turn: Turn) -> int:
        return sum(map(self.measure.cost, turn.messages))

    def _target(self, strategy: CompactionStrategy, turns: Sequence[Turn], limits: Limits) -> int:
        """Tokens down to which a strategy is to go.

        The low mark; but where system, task, tools and newest turn are large themselves, half of what
        they leave free: dropping everything else would not make the next compaction come much later.
        """
        high = limits.high
        if strategy.target == "high":
            return high
        task = first_task(turns)
        pinned = sum(
            self._cost(turn)
            for i, turn in enumerate(turns)
            if turn.pinned and i != task and turn.kind != "system"
        )
        newest = sum(self._cost(turn) for turn in turns if turn.newest and not turn.pinned)
        fixed = self.measure.head + pinned + min(newest, high // 2)
        return min(high, max(limits.low, (fixed + high) // 2))

    def _on_first_sight(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The history with the strategies applied that run on first sight."""
        strategies = [s for s in self.settings.strategies if s.on_first_sight]
        if not strategies:
            return messages
        turns: Sequence[Turn] = self.settings.pins.mark(group_turns(messages))
        for strategy in strategies:
            context = CompactionContext(
                need=0,
                prompt_limit=self.limits.prompt,
                counter=self.settings.counter,
                count=lambda turns: self.measure.tokens(flatten_turns(turns)),
                cost=self._cost,
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


def _check_strategy(strategy: CompactionStrategy, before: Sequence[Turn], after: Sequence[Turn]) -> None:
    kept = {origin for turn in after for origin in turn.origins}
    for turn in before:
        if (turn.pinned or turn.newest) and any(o is not None and o not in kept for o in turn.origins):
            raise StrategyError(
                f"{strategy.name} left out a turn that must stay (messages {turn.origins}); "
                "a strategy may drop only turns that are neither pinned nor newest"
            )
