"""One call from Agent Lightning's resources to a guarded client."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import openai

from ctxguard.client.guard import Guard
from ctxguard.errors import ConfigurationError
from ctxguard.scope import current_scope

_guard: Guard | None = None
_lock = threading.Lock()


def use_guard(guard: Guard) -> Guard:
    """Make this the guard of the process: the one that `guarded_client` wraps with.

    Call it once, where the agent's module is imported: runners are processes of their own.

    Example:
        >>> from ctxguard import ContextBudget, Guard
        >>> guard = use_guard(Guard(ContextBudget(window=20480, max_response_tokens=1024)))
    """
    global _guard
    with _lock:
        _guard = guard
    return guard


def default_guard() -> Guard:
    """The guard of the process. Where `use_guard` was not called it is a plain `Guard`, which asks the server
    for its window; Agent Lightning's LLM proxy (v1 mode) hides that, its v0 proxy passes vLLM's on."""
    global _guard
    with _lock:
        if _guard is None:
            _guard = Guard()
        return _guard


def guarded_client(
    source: Any, rollout: Any = None, *, guard: Guard | None = None, **client_options: Any
) -> openai.OpenAI:
    """A guarded OpenAI client for the LLM of a rollout.

    Its base URL names rollout and attempt where Agent Lightning's proxy wants that; what the guard learns
    about the server helps all rollouts of the process.

    Args:
        source: the ``llm`` that the rollout function was given (``LLM`` or ``ProxyLLM``), or its
            ``resources``, of which the first LLM is taken.
        rollout: the ``rollout`` that it was given. Needed for a ``ProxyLLM``, unless `mark_failures` is
            around and knows the ids.
        guard: a guard other than `default_guard`.
        client_options: for ``openai.OpenAI``, e.g. ``timeout`` in seconds, ``max_retries``.

    Raises:
        ConfigurationError: the source has no LLM, or the rollout of a ``ProxyLLM`` is unknown.

    Example:
        >>> client = guarded_client(llm)  # doctest: +SKIP
        >>> client.chat.completions.create(**request_defaults(llm), messages=[…])  # doctest: +SKIP
    """
    options = _client_options(llm_of(source), rollout, client_options)
    return (guard or default_guard()).wrap(openai.OpenAI(**options))


def guarded_async_client(
    source: Any, rollout: Any = None, *, guard: Guard | None = None, **client_options: Any
) -> openai.AsyncOpenAI:
    """`guarded_client` for coroutines; arguments and errors are the same."""
    options = _client_options(llm_of(source), rollout, client_options)
    return (guard or default_guard()).wrap(openai.AsyncOpenAI(**options))


def request_defaults(source: Any) -> dict[str, Any]:
    """Model and sampling parameters of the LLM, as keyword arguments of ``create``.

    The daemon sets the temperature there, 0 or its own in validation; a rollout sampled with another one is
    off-policy. It sets no output limit.

    Args:
        source: as for `guarded_client`.

    Raises:
        ConfigurationError: the source has no LLM.
    """
    llm = llm_of(source)
    return {"model": llm.model, **llm.sampling_parameters}


def llm_of(source: Any) -> Any:
    """The LLM itself, or the first one among resources.

    Raises:
        ConfigurationError: there is none.
    """
    candidates = list(source.values()) if isinstance(source, Mapping) else [source]
    for candidate in candidates:
        if hasattr(candidate, "model") and getattr(candidate, "resource_type", None) in ("llm", "proxy_llm"):
            return candidate
    names = ", ".join(map(str, source)) if isinstance(source, Mapping) else type(source).__qualname__
    raise ConfigurationError(
        f"no LLM in {names or 'empty resources'}: give the llm or the resources of the rollout function"
    )


def _client_options(llm: Any, rollout: Any, client_options: dict[str, Any]) -> dict[str, Any]:
    # Never OPENAI_API_KEY from the environment: it is not for the server that is being trained.
    options = {"base_url": base_url_of(llm, rollout), "api_key": getattr(llm, "api_key", None) or "none"}
    return {**options, **client_options}


def base_url_of(llm: Any, rollout: Any = None) -> str:
    """The base URL to use for a rollout.

    Raises:
        ConfigurationError: a ``ProxyLLM``, and nobody says for which rollout. Without it the proxy would
            record no span, and the rollout would have nothing to train on.
    """
    if llm.resource_type != "proxy_llm":
        return str(llm.endpoint)
    scope = current_scope()
    rollout_id = getattr(rollout, "rollout_id", None)
    attempt_id = getattr(getattr(rollout, "attempt", None), "attempt_id", None)
    if rollout is None and scope is not None:
        rollout_id, attempt_id = scope.rollout_id, scope.attempt_id
    if rollout_id is None or attempt_id is None:
        raise ConfigurationError(
            "the LLM is a ProxyLLM, whose URL must name rollout and attempt, and they are unknown: pass the "
            "rollout that the rollout function was given, guarded_client(resources, rollout)"
        )
    return str(llm.get_base_url(rollout_id, attempt_id))
