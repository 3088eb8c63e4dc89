"""The agent's side: a run that ends as exactly one thing, and a guarded client in one call."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import openai

from ctxguard.budget import ContextBudget
from ctxguard.client.guard import Guard
from ctxguard.errors import RolloutFailedError, ServerUnavailableError
from ctxguard.integrations.agentlightning_v1.gateway import Gateway, Told
from ctxguard.integrations.marks import SPAN_NAME, FailureMark
from ctxguard.outcome import FailureReason, RolloutOutcome, guarded_rollout

logger = logging.getLogger("ctxguard")

Function = TypeVar("Function", bound=Callable[..., Any])
Client = TypeVar("Client", bound=openai.OpenAI | openai.AsyncOpenAI)

MAX_RETRIES = 6
"""Of the client; as in Agent Lightning's own examples, since the gateway answers 429 while it is paused."""


@overload
def guarded_run(function: Function) -> Function: ...
@overload
def guarded_run(
    *,
    post_reward: bool = True,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> Callable[[Function], Function]: ...


def guarded_run(
    function: Callable[..., Any] | None = None,
    *,
    post_reward: bool = True,
    reward_of: Callable[[Any], Any] | None = None,
    accept_after_recovery: bool = False,
    require_calls: bool = True,
) -> Any:
    """Make an agent's ``run`` (a method or a function, sync or async) end as exactly one thing.

    *Succeeded*: the reward is posted and what ``run`` returned is returned. *Failed* (a context overflow,
    swallowed or not; no call that was answered; no reward; an exception): one event ``ctxguard.failed`` with
    a `FailureMark`, and an exception, so that the process ends with a non-zero status and the controller
    reports the rollout as failed. The agent's own exception is raised as it was.

    The reward is what ``run`` returns; an agent that posts its ``reward`` event itself may return None.

    Args:
        function: the agent's ``run``.
        post_reward: post the returned reward; False where the agent has posted it already.
        reward_of: takes the reward out of what ``run`` returns.
        accept_after_recovery: a swallowed overflow does not fail the rollout if a later call was answered.
        require_calls: fail a rollout none of whose calls was answered. Set it to False where calls go
            through clients that are not wrapped.

    Raises:
        RolloutFailedError: the rollout failed and no exception of the agent says so.
        ServerUnavailableError: the reward could not be posted; without it the rollout must not succeed.
        ConfigurationError: the controller's environment variables are missing.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        def begin() -> _Run:
            return _Run(Gateway.from_environment(), reward_of, post_reward)

        def guard(body: Callable[..., Any], run: _Run) -> Callable[..., Any]:
            guarded: Callable[..., Any] = guarded_rollout(
                rollout_id=run.gateway.rollout_id,
                attempt_id=run.gateway.attempt_id,
                accept_after_recovery=accept_after_recovery,
                require_calls=require_calls,
            )(body)
            return guarded

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def arun(*args: Any, **kwargs: Any) -> Any:
                run = begin()

                async def body() -> Any:
                    return run.reward(await function(*args, **kwargs))

                try:
                    outcome = await guard(body, run)()
                except SystemExit as end:
                    run.exited(end)
                    raise
                return run.end(outcome)

            return arun

        @functools.wraps(function)
        def run_(*args: Any, **kwargs: Any) -> Any:
            run = begin()

            def body() -> Any:
                return run.reward(function(*args, **kwargs))

            try:
                outcome = guard(body, run)()
            except SystemExit as end:
                run.exited(end)
                raise
            return run.end(outcome)

        return run_

    return decorate if function is None else decorate(function)


class _Run:
    """One run of an agent: what it returned, and how it ends."""

    def __init__(self, gateway: Gateway, reward_of: Callable[[Any], Any] | None, post_reward: bool) -> None:
        self.gateway = gateway
        self.reward_of = reward_of
        self.post_reward = post_reward
        self.returned: Any = None

    def reward(self, value: Any) -> Any:
        """The reward of a run that returned. Called inside the guard: an error here fails the rollout."""
        self.returned = value
        reward = value if self.reward_of is None else self.reward_of(value)
        if reward is None:
            # The run is over: nothing else of this process waits on the event loop that may be running.
            self.post_reward = False
            reward = self.gateway.posted_reward()
        return reward

    def end(self, outcome: RolloutOutcome) -> Any:
        """Tell the server how it ended; returns or raises accordingly."""
        if outcome.failure is not None:
            self.mark(FailureMark.of(outcome))
            if outcome.error is not None:
                raise outcome.error
            failure = outcome.failure
            raise RolloutFailedError(
                f"rollout {outcome.rollout_id} failed: {failure.reason.value}: {failure.detail}",
                reason=failure.reason.value,
                rollout_id=outcome.rollout_id,
                attempt_id=outcome.attempt_id,
            )
        if self.post_reward:
            try:
                self.gateway.post("reward", {"value": outcome.reward, "source": "agent"})
            except ServerUnavailableError as error:
                detail = f"the reward could not be posted ({error.message})"
                self.mark(self._mark(FailureReason.EXCEPTION, detail))
                raise
        return self.returned

    def exited(self, end: SystemExit) -> None:
        """The agent ended its own process."""
        if end.code:
            detail = f"the agent ended its process with exit status {end.code!r:.60}"
            self.mark(self._mark(FailureReason.EXCEPTION, detail))

    def mark(self, mark: FailureMark) -> None:
        """Post the mark. The failure itself goes on in any case: it is what ends the process."""
        try:
            self.gateway.post(SPAN_NAME, mark.to_dict())
        except ServerUnavailableError as error:
            logger.error(
                "rollout %s failed (%s), and its mark was not taken, so that the trainer will not know the "
                "reason: %s",
                mark.rollout_id,
                mark.reason,
                error.message,
            )

    def _mark(self, reason: FailureReason, detail: str) -> FailureMark:
        gateway = self.gateway
        return FailureMark(reason.value, detail, rollout_id=gateway.rollout_id, attempt_id=gateway.attempt_id)


@overload
def guarded_client(
    budget: ContextBudget | int | None = None,
    *,
    client_class: type[Client],
    guard: Guard | None = None,
    client_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Client: ...
@overload
def guarded_client(
    budget: ContextBudget | int | None = None,
    *,
    guard: Guard | None = None,
    client_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> openai.OpenAI: ...


def guarded_client(
    budget: ContextBudget | int | None = None,
    *,
    client_class: type[Any] = openai.OpenAI,
    guard: Guard | None = None,
    client_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A guarded OpenAI client for this process's rollout, from the controller's environment variables.

    The budget is ``budget``, else what the trainer's side tells (`FailedRolloutHooks.budget`, or
    `GuardedTrainer` from its configuration), else what the model server says of itself. The gateway forwards
    chat completions only and records each of them to train on; the guard's own requests (window, summaries)
    therefore go to the model server itself, which the trainer's side tells too, or the environment variables
    ``CTXGUARD_MODEL_URL`` (and ``CTXGUARD_MODEL_NAME``). Without either, no summary can be had: the
    strategies after it take over, and the report says so.

    Args:
        budget: a `ContextBudget`, or the window in tokens.
        client_class: ``openai.OpenAI``, ``openai.AsyncOpenAI``, or a subclass of one.
        guard: a guard of your own; the other settings are then its own.
        client_options: further arguments of ``client_class``, e.g. ``timeout`` in seconds.
        options: further options of `Guard`, e.g. ``tokenizer``.

    Raises:
        ConfigurationError: the controller's environment variables are missing.
    """
    gateway = Gateway.from_environment()
    client = client_class(
        **{
            "base_url": gateway.openai_url,
            "api_key": gateway.key or "none",
            "max_retries": MAX_RETRIES,
            **(client_options or {}),
        }
    )
    if guard is None:
        told = _told(gateway)
        options.setdefault("model_server", gateway.model_server(told))
        guard = Guard(told.budget if budget is None else budget, **options)
    return guard.wrap(client)


def _told(gateway: Gateway) -> Told:
    try:
        return gateway.told()
    except ServerUnavailableError as error:
        logger.warning("the trainer's budget could not be read: %s", error.message)
        return Told()
