"""Qwen-Agent: its OpenAI chat classes, sending through a guarded client.

    from qwen_agent.agents import Assistant
    import ctxguard.integrations.qwen_agent  # registers the model types below

    llm = {"model_type": "ctxguard_oai", "model": "Qwen3-8B", "model_server": "http://…/v1", "guard": guard}
    agent = Assistant(llm=llm, function_list=[…])

=======================  =====================================================================
``model_type``           in place of
=======================  =====================================================================
``ctxguard_oai``         ``oai``
``ctxguard_qwenvl_oai``  ``qwenvl_oai``
``ctxguard_azure``       ``azure``
=======================  =====================================================================

Everything else in the config is Qwen-Agent's own. Its rough cut of the history (``max_input_tokens``, 58000
by default, counted without the tools) is off: what it took away would be gone before the guard sees it.

An overflow arrives as Qwen-Agent's ``ModelServiceError`` with code 400, never retried; ``exception`` is the
`ContextOverflowError`, and `guarded_rollout` finds it there.

Written against qwen-agent 0.0.34. It is imported with this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import openai
from qwen_agent.llm.azure import TextChatAtAzure
from qwen_agent.llm.base import ModelServiceError, register_llm
from qwen_agent.llm.oai import TextChatAtOAI
from qwen_agent.llm.qwenvl_oai import QwenVLChatAtOAI

from ctxguard.client.guard import Guard
from ctxguard.errors import ConfigurationError, ContextOverflowError
from ctxguard.integrations.agentlightning.client import (
    base_url_of,
    default_guard,
    llm_of,
    request_defaults,
    use_guard,
)

__all__ = [
    "GuardedChatAtAzure",
    "GuardedChatAtOAI",
    "GuardedVLChatAtOAI",
    "llm_config",
    "use_guard",
]

_OWN_CUT = "max_input_tokens"
_BODY_ONLY = ("top_k", "repetition_penalty")
"""Settings that the OpenAI SDK has no argument for; Qwen-Agent moves them into the body, and so do we."""


class _Guarded:
    """Mixin before a chat class of Qwen-Agent's that talks to an OpenAI server.

    Qwen-Agent makes a new client inside each call, and keeps the function that does so in an attribute of the
    chat object; that is what is replaced, with the guarded client of this object.
    """

    generate_cfg: dict[str, Any]

    def __init__(self, cfg: Mapping[str, Any] | None = None) -> None:
        cfg = dict(cfg or {})
        guard = cfg.pop("guard", None)
        if guard is not None and not isinstance(guard, Guard):
            raise ConfigurationError(
                f"the llm config's guard is a {type(guard).__qualname__}; give a ctxguard.Guard, or leave it "
                "out and call use_guard(…) once"
            )
        _refuse_own_cut(cfg.get("generate_cfg"))
        super().__init__(cfg)  # type: ignore[call-arg]
        self.generate_cfg[_OWN_CUT] = 0
        self._client = (guard or default_guard()).wrap(self._plain_client(cfg))
        self._chat_complete_create = self._create

    def _plain_client(self, cfg: Mapping[str, Any]) -> openai.OpenAI:
        return openai.OpenAI(**_address(cfg, "base_url", ("api_base", "base_url", "model_server")))

    def _create(self, **request: Any) -> Any:
        body = {name: request.pop(name) for name in _BODY_ONLY if name in request}
        if body:
            request["extra_body"] = {**(request.get("extra_body") or {}), **body}
        if "request_timeout" in request:
            request["timeout"] = request.pop("request_timeout")
        return self._client.chat.completions.create(**request)

    def chat(
        self,
        messages: Any,
        functions: Any = None,
        stream: bool = True,
        delta_stream: bool = False,
        extra_generate_cfg: Mapping[str, Any] | None = None,
    ) -> Any:
        """As Qwen-Agent's.

        Raises:
            ConfigurationError: ``extra_generate_cfg`` turns Qwen-Agent's own cut on.
        """
        _refuse_own_cut(extra_generate_cfg)
        chat = super().chat  # type: ignore[misc]
        return chat(messages, functions, stream, delta_stream, extra_generate_cfg)

    def _chat_stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with _overflow_is_final():
            yield from super()._chat_stream(*args, **kwargs)  # type: ignore[misc]

    def _chat_no_stream(self, *args: Any, **kwargs: Any) -> Any:
        with _overflow_is_final():
            return super()._chat_no_stream(*args, **kwargs)  # type: ignore[misc]

    def convert_messages_to_dicts(self, messages: Any) -> list[dict[str, Any]]:
        """As Qwen-Agent's; native results (``use_raw_api``) also say in OpenAI's field whose they are.

        Qwen-Agent writes the call's id into ``id`` alone; a result that names no call belongs to none.
        """
        converted: list[dict[str, Any]] = super().convert_messages_to_dicts(messages)  # type: ignore[misc]
        for message in converted:
            if message["role"] == "tool" and "id" in message:
                message.setdefault("tool_call_id", message["id"])
        return converted


@register_llm("ctxguard_oai")
class GuardedChatAtOAI(_Guarded, TextChatAtOAI):  # type: ignore[misc]
    """Qwen-Agent's ``oai`` through the guard; its ``model_type`` is ``"ctxguard_oai"``.

    The config is Qwen-Agent's own, and may hold ``guard``, a `Guard`; else that of `use_guard` is taken. An
    overflow is raised as ``ModelServiceError``, code ``"400"``, and not tried again; its ``exception`` is
    the `ContextOverflowError`.

    Raises:
        ConfigurationError: ``guard`` is no `Guard`, or ``max_input_tokens`` turns Qwen-Agent's own cut on.
    """


@register_llm("ctxguard_qwenvl_oai")
class GuardedVLChatAtOAI(_Guarded, QwenVLChatAtOAI):  # type: ignore[misc]
    """Qwen-Agent's ``qwenvl_oai`` through the guard, ``"ctxguard_qwenvl_oai"``; see `GuardedChatAtOAI`."""


@register_llm("ctxguard_azure")
class GuardedChatAtAzure(_Guarded, TextChatAtAzure):  # type: ignore[misc]
    """Qwen-Agent's ``azure`` through the guard, ``"ctxguard_azure"``; see `GuardedChatAtOAI`."""

    def _plain_client(self, cfg: Mapping[str, Any]) -> openai.OpenAI:
        names = ("api_base", "base_url", "model_server", "azure_endpoint")
        version = cfg.get("api_version", "2024-06-01")  # Qwen-Agent's default
        return openai.AzureOpenAI(api_version=version, **_address(cfg, "azure_endpoint", names))


def llm_config(
    source: Any, rollout: Any = None, *, guard: Guard | None = None, **generate_cfg: Any
) -> dict[str, Any]:
    """Qwen-Agent's llm config for the LLM of an Agent Lightning rollout.

    Args:
        source, rollout: as for `ctxguard.integrations.agentlightning.guarded_client`.
        guard: a guard other than the one of `use_guard`.
        generate_cfg: Qwen-Agent's generation settings, laid over the sampling parameters that Agent Lightning
            gives, e.g. ``max_tokens=1024``.

    Raises:
        ConfigurationError: the source has no LLM, or the rollout of a ``ProxyLLM`` is unknown.

    Example:
        >>> agent = Assistant(llm=llm_config(resources, rollout), function_list=tools)  # doctest: +SKIP
    """
    llm = llm_of(source)
    defaults = request_defaults(llm)
    config = {
        "model_type": "ctxguard_oai",
        "model": defaults.pop("model"),
        "model_server": base_url_of(llm, rollout),
        "api_key": getattr(llm, "api_key", None) or "none",
        "generate_cfg": {**defaults, **generate_cfg},
    }
    return config if guard is None else {**config, "guard": guard}


def _address(cfg: Mapping[str, Any], argument: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Where the client goes, looked for as Qwen-Agent does."""
    url = next((cfg[name] for name in names if cfg.get(name)), "").strip()
    key = (cfg.get("api_key") or os.getenv("OPENAI_API_KEY") or "EMPTY").strip()
    return {"api_key": key, **({argument: url} if url else {})}


def _refuse_own_cut(generate_cfg: Mapping[str, Any] | None) -> None:
    limit = (generate_cfg or {}).get(_OWN_CUT, 0)
    if limit > 0:
        raise ConfigurationError(
            f"max_input_tokens={limit} lets Qwen-Agent cut the history before the guard sees it; leave it "
            f"out, and give the guard the limit: ContextBudget(window=…, max_prompt_tokens={limit})"
        )


@contextmanager
def _overflow_is_final() -> Iterator[None]:
    """An overflow carries the code of a bad request: Qwen-Agent then does not try the same prompt again."""
    try:
        yield
    except ModelServiceError as error:
        if isinstance(error.exception, ContextOverflowError):
            error.code = "400"
        raise
