"""The decorator that makes every rollout end once: with a reward, or marked as failed and raised."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from ctxguard.errors import ConfigurationError, RolloutFailedError
from ctxguard.integrations.agentlightning.marking import stamp, write_mark
from ctxguard.integrations.agentlightning.rewards import as_float, reward_in
from ctxguard.integrations.marks import FailureMark
from ctxguard.outcome import RolloutOutcome, guarded_rollout
from ctxguard.scope import ids_from_url

ROLLOUT_METHODS = (
    "rollout",
    "rollout_async",
    "training_rollout",
    "training_rollout_async",
    "validation_rollout",
    "validation_rollout_async",
)
"""Methods of a ``LitAgent`` that runners call."""

Target = TypeVar("Target")
Ids = tuple[str | None, str | None]

_running: ContextVar[Ids | None] = ContextVar("ctxguard_agl_rollout", default=None)


@overload
def mark_failures(target: Target) -> Target: ...
@overload
def mark_failures(
    *,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> Callable[[Target], Target]: ...


def mark_failures(
    target: Any = None,
    *,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> Any:
    """Have each rollout end exactly once: with a reward, or as a marked failure that the runner sees.

    Goes *under* ``@agl.rollout``, on the rollout methods of a ``LitAgent``, or on a whole ``LitAgent`` class.
    Signatures and coroutine-ness stay. The function runs in a `RolloutScope` with the ids of rollout and
    attempt, so that the calls of guarded clients are counted for it.

    A rollout has failed where `guarded_rollout` says so: it raised, its calls were not answered, it met an
    unrecoverable overflow (even if the agent swallowed the error), or it has no reward. Its `FailureMark` is
    written where the trainer's side looks for it (the package's docstring has the table), and the error is
    raised: the user's own as it was, `RolloutFailedError` where there is none. A reward of None never leaves
    as a success.

    What the function returned goes on as it is, but for numbers, which become a float (0.1 and v0 mode ignore
    an int). `ctxguard.integrations.agentlightning.rewards` says where the reward is looked for.

    Args:
        target: a rollout function, a rollout method, or a ``LitAgent`` class.
        reward_of: takes the reward out of what the function returns; Agent Lightning is then handed the
            reward alone, as a float.
        accept_after_recovery: a swallowed overflow does not fail the rollout if a later call was answered.
        require_calls: fail a rollout none of whose calls was answered. Set it to False where calls go through
            clients that are not guarded.

    Raises:
        ConfigurationError: the target is an agent object (the decorator stands above ``@agl.rollout``), or a
            class without a rollout method of its own.
        RolloutFailedError: raised by the decorated function, for a failed rollout that has no error of its
            own: no reward, no answered call, a swallowed overflow.

    Example:
        >>> @mark_failures(require_calls=False)
        ... def agent(task, llm):
        ...     return 1
        >>> agent("t", None)
        1.0
    """

    def decorate(target: Any) -> Any:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return _wrap(function, reward_of, accept_after_recovery, require_calls)

        if inspect.isclass(target):
            return _decorate_class(target, wrap)
        if hasattr(target, "training_rollout"):
            raise ConfigurationError(
                f"mark_failures was given an agent, a {type(target).__qualname__}, not a function: put it "
                "below @agl.rollout, next to the function"
            )
        return wrap(target)

    return decorate if target is None else decorate(target)


def _decorate_class(agent_class: type[Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Wrap the rollout methods that the user wrote, and write the mark before a result is posted (v0)."""
    own = [name for name in ROLLOUT_METHODS if _is_users(agent_class, name)]
    if not own:
        raise ConfigurationError(
            f"{agent_class.__qualname__} has no rollout method of its own for mark_failures to wrap "
            f"({', '.join(ROLLOUT_METHODS)})"
        )
    for name in own:
        setattr(agent_class, name, wrap(inspect.getattr_static(agent_class, name)))
    inherited = getattr(agent_class, "on_rollout_end", None)
    if inherited is not None:  # not in 0.1

        @functools.wraps(inherited)
        def on_rollout_end(self: Any, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
            stamp(rollout)
            inherited(self, task, rollout, runner, tracer)

        agent_class.on_rollout_end = on_rollout_end
    return agent_class


def _is_users(agent_class: type[Any], name: str) -> bool:
    """Whether a rollout method is written by the user; Agent Lightning asks which of them are overridden."""
    owner = next((base for base in agent_class.__mro__ if name in vars(base)), None)
    return owner is not None and owner.__module__.partition(".")[0] != "agentlightning"


@dataclass(frozen=True)
class _Returned:
    """What the rollout function returned, and the reward found in it."""

    value: Any
    reward: Any


def _wrap(
    function: Callable[..., Any],
    reward_of: Callable[[Any], Any] | None,
    accept_after_recovery: bool,
    require_calls: bool,
) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    def ids_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ids:
        return ids_in({**dict(zip(names, args, strict=False)), **kwargs})

    # The reward is looked for inside the guarded function: an error of reward_of fails the rollout, too.
    def measured(value: Any) -> _Returned:
        return _Returned(value, reward_in(value) if reward_of is None else as_float(reward_of(value)))

    def finish(outcome: RolloutOutcome, ids: Ids) -> Any:
        if outcome.is_failed:
            _fail(outcome, ids)
        value = outcome.value.value
        keep = reward_of is None and (
            value is None or isinstance(value, list) or hasattr(value, "final_reward")
        )
        return value if keep else outcome.reward

    def guarded(inner: Callable[..., Any], ids: Ids) -> Callable[..., Any]:
        return guarded_rollout(
            rollout_id=ids[0],
            attempt_id=ids[1],
            reward_of=lambda returned: returned.reward,
            accept_after_recovery=accept_after_recovery,
            require_calls=require_calls,
        )(inner)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def arun(*args: Any, **kwargs: Any) -> Any:
            ids = ids_of(args, kwargs)
            if _is_inner(ids):
                return await function(*args, **kwargs)

            async def inner() -> _Returned:
                return measured(await function(*args, **kwargs))

            token = _running.set(ids)
            try:
                return finish(await guarded(inner, ids)(), ids)
            finally:
                _running.reset(token)

        return arun

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ids = ids_of(args, kwargs)
        if _is_inner(ids):
            return function(*args, **kwargs)
        token = _running.set(ids)
        try:
            return finish(guarded(lambda: measured(function(*args, **kwargs)), ids)(), ids)
        finally:
            _running.reset(token)

    return run


def _is_inner(ids: Ids) -> bool:
    """Whether this is a call within a rollout that is looked after already: ``training_rollout`` may call
    ``rollout``, and each rollout ends once."""
    outer = _running.get()
    return outer is not None and (ids[0] == outer[0] or None in (ids[0], outer[0]))


def _fail(outcome: RolloutOutcome, ids: Ids) -> None:
    mark = FailureMark.of(outcome)
    write_mark(mark if ids[0] is not None else replace(mark, rollout_id=""))  # not the random id of the scope
    if outcome.error is not None:
        raise outcome.error  # as it was: the runner logs it with its type and traceback
    raise RolloutFailedError(
        f"rollout {mark.rollout_id} failed ({mark.reason}): {mark.detail}",
        reason=mark.reason,
        rollout_id=mark.rollout_id,
        attempt_id=mark.attempt_id,
    )


def ids_in(arguments: Mapping[str, Any]) -> Ids:
    """Rollout and attempt id from the arguments of a rollout function, None where they do not say.

    From the rollout object, else from the path of an LLM's endpoint, else from ``rollout_id`` (0.1). The
    objects are known by what they are: what users call the parameters of ``rollout`` is up to them.
    """
    rollout = next((value for value in arguments.values() if hasattr(value, "rollout_id")), None)
    rollout_id = getattr(rollout, "rollout_id", None)
    attempt_id = getattr(getattr(rollout, "attempt", None), "attempt_id", None)
    if attempt_id is None:
        found = next((ids for ids in map(_ids_of_llm, _llms_in(arguments)) if ids is not None), None)
        if found is not None and rollout_id in (None, found[0]):
            return found
    if rollout_id is None:
        rollout_id = arguments.get("rollout_id")
    return (rollout_id if isinstance(rollout_id, str) else None), attempt_id


def _llms_in(arguments: Mapping[str, Any]) -> Iterator[Any]:
    for value in arguments.values():
        for candidate in value.values() if isinstance(value, Mapping) else (value,):
            if getattr(candidate, "resource_type", None) == "llm":  # a proxy_llm's endpoint names no rollout
                yield candidate


def _ids_of_llm(llm: Any) -> tuple[str, str | None] | None:
    return ids_from_url(str(llm.endpoint))
