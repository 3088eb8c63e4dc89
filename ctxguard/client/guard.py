"""The guard: what one process knows about its models, servers and budgets."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

from ctxguard.budget import ContextBudget
from ctxguard.client.flow import Call
from ctxguard.client.served import ModelServer, discover_window, takes_return_token_ids
from ctxguard.compaction import CompactionStrategy
from ctxguard.effects import Flow
from ctxguard.errors import ConfigurationError, WindowUnknownError
from ctxguard.events import Answered, Event
from ctxguard.history import Ledger, digest
from ctxguard.manager import FitReport, HistoryManager, Mode
from ctxguard.messages import Turn
from ctxguard.scope import RolloutScope, current_scope, ids_from_url, open_scope
from ctxguard.tokens import Dialect, TokenCounter, counter_for

ResponseMode = Literal["keep", "enforce"]
Client = TypeVar("Client")

MAX_URL_SCOPES = 4_096


class CountMismatchWarning(UserWarning):
    """A count that was to be exact is not the server's. Given once per server and model."""


class Guard:
    """One per process: holds counters, ledger, learnt limits and settings. Wrapping a client is cheap.

    Knowledge of the window is looked for in this order: ``budget`` (explicit, or from a verl config by
    `ContextBudget.from_verl`), the server, an error that names all ways.

    Args:
        budget: a `ContextBudget`, or the window as a plain number of tokens; None asks the server.
        counter: a `TokenCounter` for all models, or a mapping from model name to one.
        tokenizer: instead of a counter: a HF tokenizer object, a model folder or a ``tokenizer.json``.
        template: chat template (text or path), where ``tokenizer`` has none or the server uses another.
        dialect: whose way of preparing messages ``tokenizer`` follows: ``"vllm"`` or ``"llama.cpp"``.
        strategies: compaction strategies from cheap to costly; None takes `default_strategies`.
        mode: ``"enforce"``; ``"observe"`` counts and reports and changes nothing; ``"off"``.
        response: ``"keep"`` leaves the request's output limit alone (the reserve still holds);
            ``"enforce"`` sets or lowers it, reported as `OutputLimited`.
        pin: turns for which this is true are kept as they are.
        pin_tools: names of tools whose turns are kept as they are.
        mend: repair histories that break the rules; reported.
        max_attempts: requests sent for one call at most, recoveries included.
        on_event: called with every `Event`; its exceptions pass through.
        on_report: called with every `FitReport` (holds the messages sent).
        ledger: a shared ledger; None makes one.
        model_server: where the guard's own requests (window, summaries) go, if the clients' base URL is a
            gateway's that would not forward them or would record them; None takes the clients' server.

    Example:
        >>> from ctxguard import Guard, ContextBudget
        >>> guard = Guard(ContextBudget(window=20480, max_response_tokens=1024))
        >>> client = guard.wrap(client)  # doctest: +SKIP
    """

    def __init__(
        self,
        budget: ContextBudget | int | None = None,
        *,
        counter: TokenCounter | Mapping[str, TokenCounter] | None = None,
        tokenizer: Any = None,
        template: str | Path | None = None,
        dialect: Dialect = "vllm",
        strategies: Sequence[CompactionStrategy] | None = None,
        mode: Mode = "enforce",
        response: ResponseMode = "keep",
        pin: Callable[[Turn], bool] | None = None,
        pin_tools: Collection[str] = (),
        mend: bool = False,
        max_attempts: int = 3,
        on_event: Callable[[Event], None] | None = None,
        on_report: Callable[[FitReport], None] | None = None,
        ledger: Ledger | None = None,
        model_server: ModelServer | None = None,
    ) -> None:
        _one_of("mode", mode, Mode)
        _one_of("response", response, ResponseMode)
        if max_attempts < 1:
            raise ConfigurationError(f"max_attempts must be at least 1, got {max_attempts}")
        if counter is not None and tokenizer is not None:
            raise ConfigurationError("give either counter=… or tokenizer=…, not both")
        self.budget = ContextBudget(window=budget) if isinstance(budget, int) else budget
        self.mode: Mode = mode
        self.response: ResponseMode = response
        self.max_attempts = max_attempts
        self.on_event = on_event
        self.on_report = on_report
        self.model_server = model_server
        self._counter = counter
        self._tokenizer = tokenizer
        self._template = template
        self._dialect: Dialect = dialect
        self.ledger = Ledger() if ledger is None else ledger
        self._manager_options: dict[str, Any] = {
            "strategies": strategies,
            "pin": pin,
            "pin_tools": pin_tools,
            "mend": mend,
            "ledger": self.ledger,
        }
        self.client_classes: dict[type[Any], type[Any]] = {}
        self._managers: dict[str, HistoryManager] = {}
        self._budgets: dict[tuple[str, str], ContextBudget] = {}
        self._learnt: dict[tuple[str, str], int] = {}
        self._takes_ids: dict[str, bool] = {}
        self._mismatched: set[tuple[str, str]] = set()
        self._learnt_prompts: dict[tuple[str, str], int] = {}
        self._url_scopes: OrderedDict[tuple[str, str | None], RolloutScope] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def wrap(self, client: Client) -> Client:
        """A guarded client that shares the given one's settings and connections.

        Works for OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI and subclasses of them. The given
        client stays unguarded. Wrapping a guarded client replaces its guard. Inside a rollout's scope
        the result belongs to that rollout, in other threads too.

        Raises:
            UnsupportedClientError: the client cannot be wrapped so that every way of calling is guarded.
        """
        from ctxguard.client.openai import wrap_client

        return wrap_client(self, client)

    def scope(
        self, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> AbstractContextManager[RolloutScope]:
        """Open a `RolloutScope`: ``with guard.scope("rollout-7") as scope: …``."""
        return open_scope(rollout_id, attempt_id)

    @contextmanager
    def using(self, mode: Mode) -> Iterator[None]:
        """Another mode for the calls made inside: ``with guard.using("observe"): …``."""
        _one_of("mode", mode, Mode)
        token = _mode.set({**_mode.get(), id(self): mode})
        try:
            yield
        finally:
            _mode.reset(token)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the settings, hex: two guards with the same one treat a history alike."""
        counters = self._counter if isinstance(self._counter, Mapping) else {"": self._counter}
        names = sorted((model, getattr(counter, "name", "")) for model, counter in counters.items())
        settings = (
            self.budget,
            self.mode,
            self.response,
            self.max_attempts,
            names,
            self._template,
            self._dialect,
        )
        options = {name: value for name, value in self._manager_options.items() if name != "ledger"}
        return digest(repr((settings, options)).encode()).hex()

    # What the flow asks. Not part of the public surface.

    @property
    def effective_mode(self) -> Mode:
        return _mode.get().get(id(self), self.mode)

    def manager_for(self, model: str) -> HistoryManager:
        manager = self._managers.get(model)
        if manager is None:
            manager = self._managers[model] = HistoryManager(
                self._counter_for(model), **self._manager_options
            )
        return manager

    def _counter_for(self, model: str) -> TokenCounter:
        if isinstance(self._counter, Mapping):
            if model not in self._counter:
                known = ", ".join(sorted(self._counter)) or "none"
                raise ConfigurationError(f"no counter for model {model!r}; counters were given for: {known}")
            return self._counter[model]
        if self._counter is not None:
            return self._counter
        return counter_for(model, tokenizer=self._tokenizer, template=self._template, dialect=self._dialect)

    def budget_for(self, call: Call) -> Flow[ContextBudget]:
        key = (call.server, call.model)
        budget = self.budget or self._budgets.get(key)
        if budget is None:
            found = yield from discover_window(call.model, call.server)
            if found is None:
                raise WindowUnknownError(
                    f"the window of {call.model!r} is unknown: none was given and {call.server} does not "
                    "tell it. Give it in one of three ways: budget=ContextBudget(window=…), "
                    "budget=ContextBudget.from_verl(config), or a server that reports it "
                    "(vLLM, SGLang, llama.cpp; gateways often hide it)"
                )
            budget = self._budgets[key] = ContextBudget(window=found[0], source=found[1])
        learnt = self._learnt.get(key)
        return budget if learnt is None else budget.with_window(learnt, source="learnt")

    def takes_return_token_ids(self, call: Call) -> Flow[bool]:
        """Whether the server of a call takes ``return_token_ids``; asked once."""
        takes = self._takes_ids.get(call.server)
        if takes is None:
            # Where something else serves our own requests, it is not what answers the agent's.
            takes = False if self.model_server is not None else (yield from takes_return_token_ids())
            if takes is not None:
                self._takes_ids[call.server] = takes
        return bool(takes)

    def learn(self, server: str, model: str, limit: int, budget: ContextBudget) -> bool:
        """Remember a window that the server named; False where it teaches nothing."""
        if limit < 2 or limit >= budget.window:
            return False
        self._learnt[server, model] = limit
        self._learnt_prompts.pop((server, model), None)  # it was held against the former window
        return True

    def learn_prompt_limit(self, server: str, model: str, limit: int) -> None:
        """Remember how large a prompt may be where the server counts more than we do."""
        self._learnt_prompts[server, model] = limit

    def learnt_prompt_limit(self, server: str, model: str) -> int | None:
        return self._learnt_prompts.get((server, model))

    def scope_for(self, base_url: str, bound: RolloutScope | None) -> RolloutScope | None:
        """The running scope > the one the client is bound to > the one its URL names."""
        running = current_scope()
        if running is not None:
            return running
        if bound is not None and not bound.closed:
            return bound
        ids = ids_from_url(base_url)
        if ids is None:
            return None
        with self._lock:
            scope = self._url_scopes.get(ids)
            if scope is None:
                scope = self._url_scopes[ids] = RolloutScope(*ids)
                if len(self._url_scopes) > MAX_URL_SCOPES:
                    self._url_scopes.popitem(last=False)
            return scope

    def begin_call(self, scope: RolloutScope | None) -> int:
        if scope is None:
            return next(self._numbers)
        scope.config_fingerprint = scope.config_fingerprint or self.fingerprint
        return scope.begin_call()

    def warn_of_mismatch(self, call: Call, event: Answered) -> None:
        key = (call.server, call.model)
        if key in self._mismatched:
            return
        self._mismatched.add(key)
        warnings.warn(
            f"the count of {call.model!r} was to be exact, but {call.server} counted {event.served_tokens} "
            f"prompt tokens where we counted {event.predicted_tokens}: give the tokenizer and chat template "
            'that the server uses (for llama.cpp also dialect="llama.cpp")',
            CountMismatchWarning,
            stacklevel=2,
        )

    def emit(self, event: Event, scope: RolloutScope | None) -> None:
        if scope is not None:
            scope.record(event)
        if self.on_event is not None:
            self.on_event(event)

    def report(self, report: FitReport) -> None:
        if self.on_report is not None:
            self.on_report(report)


def wrap_openai(client: Client, budget: ContextBudget | int | None = None, **options: Any) -> Client:
    """Guard an OpenAI client in one line. All options are those of `Guard`.

    For many clients or rollouts make one `Guard` and call its ``wrap``: they then share what is learnt.

    Example:
        >>> client = wrap_openai(OpenAI(), ContextBudget(window=20480))  # doctest: +SKIP
    """
    return Guard(budget, **options).wrap(client)


_mode: ContextVar[Mapping[int, Mode]] = ContextVar("ctxguard_mode", default=MappingProxyType({}))


def _one_of(name: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ConfigurationError(f"{name} must be one of {', '.join(get_args(allowed))}; got {value!r}")
