"""The outcome of a rollout: exactly one, succeeded with a reward or failed with a reason.

Free of any framework. Agent Lightning and others read the outcome; a rollout function only needs the
decorator.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, ParamSpec, Protocol, TypeAlias, overload

from ctxguard.client.overflow import classify, facts_of
from ctxguard.errors import ContextOverflowError
from ctxguard.scope import CallCounts, RolloutScope, open_scope

logger = logging.getLogger("ctxguard")

P = ParamSpec("P")
_AsyncRollout: TypeAlias = Callable[P, Coroutine[Any, Any, "RolloutOutcome"]]


class FailureReason(str, Enum):
    """Why a rollout failed."""

    CONTEXT_OVERFLOW = "context_overflow"
    """A prompt could not be made to fit, or the server refused it to the end."""

    SWALLOWED_OVERFLOW = "swallowed_overflow"
    """The same, but the agent caught the error and returned a reward as if nothing had happened."""

    NO_CALLS = "no_calls"
    """No call through a wrapped client was answered."""

    NO_REWARD = "no_reward"
    """The rollout returned None."""

    INVALID_REWARD = "invalid_reward"
    """The rollout returned something that is not a finite number."""

    EXCEPTION = "exception"
    """The rollout raised an error that is not about length."""

    # What only the trainer's side can find:

    NO_ROWS = "no_rows"
    """It did not fail, but nothing to train on reached the trainer (no prompt and response ids)."""

    UNMARKED = "unmarked"
    """The runner says that it failed and nobody said why: a crash outside of the rollout function."""

    NOT_RETURNED = "not_returned"
    """It did not end within the stated wait."""


@dataclass(frozen=True)
class Failure:
    """What made a rollout fail.

    Attributes:
        reason: the reason.
        detail: one sentence for people; no message text of the conversation.
        numbers: the figures, e.g. ``{"prompt_tokens": 61709, "limit": 20480, "attempts": 1}``.
    """

    reason: FailureReason
    detail: str
    numbers: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutOutcome:
    """How a rollout ended.

    Attributes:
        status: ``"succeeded"`` or ``"failed"``.
        reward: the reward of a rollout that succeeded, None of one that failed: never a made-up zero.
        failure: why it failed, None where it succeeded.
        calls: what its calls came to.
        rollout_id, attempt_id: which rollout.
        config_fingerprint: digest of the guard's settings, ``""`` where no call was guarded.
        value: what the rollout function returned.
        error: the exception that ended it, with its traceback, or None.
    """

    status: Literal["succeeded", "failed"]
    reward: float | None
    failure: Failure | None
    calls: CallCounts
    rollout_id: str
    attempt_id: str | None = None
    config_fingerprint: str = ""
    value: Any = field(default=None, repr=False, compare=False)
    error: Exception | None = field(default=None, repr=False, compare=False)

    @property
    def is_failed(self) -> bool:
        """True for a failed rollout."""
        return self.status == "failed"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form: ids, status, reward, failure, calls. No message text."""
        failure = self.failure
        return {
            "rollout_id": self.rollout_id,
            "attempt_id": self.attempt_id,
            "status": self.status,
            "reward": self.reward,
            "failure": failure and {**failure.__dict__, "reason": failure.reason.value},
            "calls": dict(self.calls.__dict__),
            "config_fingerprint": self.config_fingerprint,
        }


class _Decorator(Protocol):
    """What `guarded_rollout` with options returns: it keeps parameters and coroutine-ness."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, Any]]) -> _AsyncRollout[P]: ...
    @overload
    def __call__(self, function: Callable[P, Any]) -> Callable[P, RolloutOutcome]: ...


@overload
def guarded_rollout(function: Callable[P, Coroutine[Any, Any, Any]]) -> _AsyncRollout[P]: ...
@overload
def guarded_rollout(function: Callable[P, Any]) -> Callable[P, RolloutOutcome]: ...
@overload
def guarded_rollout(
    *,
    rollout_id: str | Callable[..., str] | None = None,
    attempt_id: str | Callable[..., str | None] | None = None,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> _Decorator: ...


def guarded_rollout(
    function: Callable[..., Any] | None = None,
    *,
    rollout_id: str | Callable[..., str] | None = None,
    attempt_id: str | Callable[..., str | None] | None = None,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> Any:
    """Make a rollout function end in exactly one `RolloutOutcome`.

    Works on functions, coroutine functions and methods; the signature stays. Every ``Exception``
    becomes a failed outcome that holds it; cancellation and ``KeyboardInterrupt`` pass through.

    Args:
        function: the rollout function; it returns the reward.
        rollout_id: the id, or a callable that gets the call's arguments; None makes a random one.
        attempt_id: the same for the attempt.
        reward_of: takes the reward out of what the function returns.
        accept_after_recovery: a swallowed overflow does not fail the rollout if a later call was
            answered.
        require_calls: fail a rollout none of whose calls was answered. Set it to False where calls go
            through clients that are not wrapped.

    Example:
        >>> @guarded_rollout(require_calls=False)
        ... def rollout(task):
        ...     return 1.0
        >>> rollout("t").status
        'succeeded'
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def settle(scope: RolloutScope, value: Any, error: Exception | None) -> RolloutOutcome:
            reward = value if reward_of is None or error is not None else reward_of(value)
            failure = _failure(scope, reward, error, accept_after_recovery, require_calls)
            return _outcome(scope, value, reward, failure, error)

        @contextmanager
        def scope_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[RolloutScope]:
            rollout = rollout_id(*args, **kwargs) if callable(rollout_id) else rollout_id
            attempt = attempt_id(*args, **kwargs) if callable(attempt_id) else attempt_id
            with open_scope(rollout, attempt) as scope:
                yield scope

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def arun(*args: Any, **kwargs: Any) -> RolloutOutcome:
                with scope_of(args, kwargs) as scope:
                    try:
                        value = await function(*args, **kwargs)
                    except Exception as error:  # the rollout's border: each error becomes its outcome
                        return settle(scope, None, error)
                    return settle(scope, value, None)

            return arun

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> RolloutOutcome:
            with scope_of(args, kwargs) as scope:
                try:
                    value = function(*args, **kwargs)
                except Exception as error:  # the rollout's border: each error becomes its outcome
                    return settle(scope, None, error)
                return settle(scope, value, None)

        return run

    return decorate if function is None else decorate(function)


def _failure(
    scope: RolloutScope,
    reward: Any,
    error: Exception | None,
    accept_after_recovery: bool,
    require_calls: bool,
) -> Failure | None:
    calls = scope.calls
    overflow = _overflow_in(error)
    if overflow is not None:
        # A library may have made its own error of ours; ours has the numbers.
        overflow = scope.failure or overflow
        return Failure(FailureReason.CONTEXT_OVERFLOW, str(overflow), _numbers(overflow))
    if error is not None:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        numbers = _numbers(scope.failure) if scope.failure is not None else {}
        return Failure(FailureReason.EXCEPTION, detail[:500], numbers)
    if scope.failure is not None and not (accept_after_recovery and scope.answered_after_failure):
        detail = f"the agent swallowed a context overflow and returned a reward ({scope.failure})"
        return Failure(FailureReason.SWALLOWED_OVERFLOW, detail, _numbers(scope.failure))
    if require_calls and calls.ok == 0:
        detail = (
            f"none of its {calls.tried} guarded calls was answered"
            if calls.tried
            else "it made no call through a wrapped client; wrap the client, or pass require_calls=False"
        )
        return Failure(FailureReason.NO_CALLS, detail, {"tried": calls.tried})
    if reward is None:
        return Failure(FailureReason.NO_REWARD, "the rollout returned None instead of a reward")
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        detail = f"the reward is {reward!r:.60}, not a finite number; reward_of=… can take it from the result"
        return Failure(FailureReason.INVALID_REWARD, detail)
    return None


def _overflow_in(error: BaseException | None) -> BaseException | None:
    """The context overflow in an error's chain of causes: ours, or a provider's own refusal."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ContextOverflowError):
            return error
        status, headers, body = facts_of(error)
        if status is not None and classify(status=status, headers=headers, body=body).is_overflow:
            return error
        error = error.__cause__ or error.__context__
    return None


def _numbers(error: BaseException) -> dict[str, int]:
    names = ("prompt_tokens", "limit", "window", "output_tokens", "attempts")
    values = {name: getattr(error, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, int)}


def _outcome(
    scope: RolloutScope, value: Any, reward: Any, failure: Failure | None, error: Exception | None
) -> RolloutOutcome:
    outcome = RolloutOutcome(
        status="succeeded" if failure is None else "failed",
        reward=float(reward) if failure is None else None,
        failure=failure,
        calls=scope.calls,
        rollout_id=scope.rollout_id,
        attempt_id=scope.attempt_id,
        config_fingerprint=scope.config_fingerprint,
        value=value,
        error=error,
    )
    if failure is not None:
        trace = failure.reason is FailureReason.EXCEPTION and error is not None
        logger.log(
            logging.ERROR if trace else logging.INFO,
            "rollout %s failed: %s %s%s",
            scope.rollout_id,
            failure.reason.value,
            failure.numbers,
            "\n" + "".join(traceback.format_exception(error)) if trace else "",
        )
    return outcome
