"""Every error that ctxguard raises, on one page.

    CtxguardError
    ├── ConfigurationError (also a ValueError)
    │   ├── BudgetError              a budget that contradicts itself or leaves no room
    │   ├── CounterError             unknown model, vocabulary or chat template
    │   ├── WindowUnknownError       nobody told the window, and the server does not either
    │   └── UnsupportedClientError   a client that cannot be wrapped safely
    ├── InvalidMessagesError (also a ValueError)
    │                                the messages are not a list of mappings with a role
    ├── TemplateRefusedError         the chat template itself refuses these messages
    ├── StrategyError                a compaction strategy broke its contract
    ├── ServerUnavailableError       a server that was asked for its window or a count did not answer
    ├── RolloutFailedError           a rollout ends as failed, and no error of its own says so
    ├── FailedRolloutsError          a batch has failed rollouts, and the user chose to stop then
    └── ContextOverflowError         the prompt cannot be made to fit, or the server still refuses it
        └── ctxguard.client.openai.OpenAIContextOverflowError (also an openai.BadRequestError)

Each error carries its facts as attributes, survives pickling (rollouts cross processes), and says
what happened, against which limit, and what to try. Where a provider's error was the cause it is
reachable on ``__cause__``; errors of the provider that are not about length are never replaced.
"""

from __future__ import annotations

from typing import Any


class CtxguardError(Exception):
    """Base of all errors of ctxguard.

    Facts are keyword-only and become attributes; they are kept through ``pickle`` and ``copy``.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], facts: dict[str, Any]) -> BaseException:
    """Make an error again without running its ``__init__`` (which may need what cannot be pickled)."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ConfigurationError(CtxguardError, ValueError):
    """Something that the user configured is wrong, missing or contradictory."""


class BudgetError(ConfigurationError):
    """A budget contradicts itself or leaves no room for a prompt.

    Attributes:
        field: the setting that is wrong, or None where it is not a single one.
        value: its value.
        limit: what it is held against.
    """

    field: str | None = None
    value: Any = None
    limit: Any = None


class CounterError(ConfigurationError):
    """No exact counter can be made: unknown model, missing vocabulary or missing chat template."""


class WindowUnknownError(ConfigurationError):
    """The window is neither configured nor told by the server."""


class UnsupportedClientError(ConfigurationError):
    """This client cannot be wrapped so that every way of calling it is guarded."""


class InvalidMessagesError(CtxguardError, ValueError):
    """The messages are not a list of mappings with a ``role``.

    Attributes:
        index: position of the offending message, or None when the list itself is wrong.
    """

    index: int | None = None


class TemplateRefusedError(CtxguardError):
    """The model's chat template raised on these messages.

    The served model's template would refuse the request too (vLLM and llama.cpp answer 400).

    Attributes:
        template_message: what the template said.
    """

    template_message: str = ""


class StrategyError(CtxguardError):
    """A (custom) compaction strategy broke its contract, e.g. left out a turn that must stay."""


class ServerUnavailableError(CtxguardError):
    """A server that was asked for its window, or for a count, could not be reached.

    Attributes:
        url: what was asked.
    """

    url: str = ""


class RolloutFailedError(CtxguardError):
    """A rollout ends as failed, and no error of its own says so: it is raised for the runner to see.

    Attributes:
        reason: a `FailureReason` value, e.g. ``"no_reward"``.
        rollout_id: the rollout.
        attempt_id: the attempt, or None.
    """

    reason: str = ""
    rollout_id: str = ""
    attempt_id: str | None = None


class FailedRolloutsError(CtxguardError):
    """Rollouts of a batch failed, and failures are handled as ``"raise"``.

    Attributes:
        failed: how many.
        queued: of how many.
        reasons: their number by `FailureReason` value.
    """

    failed: int = 0
    queued: int = 0
    reasons: dict[str, int] = {}  # noqa: RUF012 - a class-level default; instances get their own


class ContextOverflowError(CtxguardError):
    """The prompt does not fit and cannot be made to, or the server still refuses it.

    Attributes:
        reason: ``"cannot_fit"`` (found before anything was sent), ``"refused"`` (the server refused
            every permitted try) or ``"output_budget"`` (the output limit alone leaves no room).
        prompt_tokens: size of the smallest prompt that could be made, in tokens, or None.
        limit: the prompt limit it was held against, in tokens, or None.
        window: the model's window, in tokens, or None.
        output_tokens: tokens reserved for the response.
        exact: whether ``prompt_tokens`` is the serving template's own count.
        attempts: how many requests were sent.
        parts: tokens by what cannot be removed, e.g. ``{"system": …, "tools": …, "task": …}``.
        largest_tools: ``[(tool name, tokens), …]``, largest first.
        report: the last `FitReport`, or None.
    """

    reason: str = "cannot_fit"
    prompt_tokens: int | None = None
    limit: int | None = None
    window: int | None = None
    output_tokens: int = 0
    exact: bool = True
    attempts: int = 0
    parts: dict[str, int] = {}  # noqa: RUF012 - a class-level default; instances get their own
    largest_tools: list[tuple[str, int]] = []  # noqa: RUF012
    report: Any = None
