"""What a server tells about itself: the window of the model it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ctxguard.client.overflow import facts_of
from ctxguard.effects import Flow, Probe
from ctxguard.errors import ServerUnavailableError

_NO_SUCH_PATH = frozenset({400, 403, 404, 405, 501})
_MODEL_KEYS = ("max_model_len", "context_length", "context_window", "max_context_length")


@dataclass(frozen=True)
class ModelServer:
    """Where a model is served, behind a gateway that forwards nothing but a rollout's own calls.

    Attributes:
        url: its base URL, e.g. ``http://10.0.0.7:8000/v1``.
        model: name under which it serves the model; None where that is the name that requests use.
    """

    url: str
    model: str | None = None


def discover_window(model: str, server: str) -> Flow[tuple[int, str] | None]:
    """The window of a served model in tokens and where it was found, or None where nobody tells.

    Asked are ``/v1/models`` (vLLM and SGLang: ``max_model_len``; llama.cpp: ``meta.n_ctx``; hosted
    gateways: ``context_length`` or ``context_window``), then llama.cpp's ``/props`` and SGLang's
    ``/get_server_info``. llama.cpp divides its context among its slots and reports the window of one
    slot, which is what a request gets; ``n_ctx_train`` is not it.

    Args:
        model: the model's name as requests give it.
        server: base URL, for the error.

    Raises:
        ServerUnavailableError: the server cannot be reached.
    """
    for path, find in _SOURCES:
        body = yield from _ask(path, server)
        window = find(body, model) if isinstance(body, Mapping) else None
        if window is not None:
            return window, path.lstrip("/")
    return None


def takes_return_token_ids() -> Flow[bool | None]:
    """Whether the server takes ``return_token_ids`` in a request; None where it could not be asked.

    vLLM does, since 0.10.2, and names itself in ``/v1/models``. Others refuse fields that they do not know,
    or ignore them; a gateway in between asks for the ids itself (Agent Lightning's do) or passes nothing on.
    """
    try:
        body = yield Probe("/models")
    except Exception:  # whatever is wrong with the server, the request itself will say it better
        return None
    entries = _mappings(body.get("data")) if isinstance(body, Mapping) else iter(())
    return any(entry.get("owned_by") == "vllm" for entry in entries)


def _ask(path: str, server: str) -> Flow[Any]:
    try:
        return (yield Probe(path))
    except Exception as error:  # sorted here: no such path, a server that is down, and the provider's own
        cause = error
    status = facts_of(cause).status
    if status in _NO_SUCH_PATH:
        return None
    if status is not None:
        raise cause
    raise ServerUnavailableError(
        f"{server} did not answer when asked for the model's window ({type(cause).__name__}). Start the "
        "server, correct base_url, or give the window: budget=ContextBudget(window=…)",
        url=server,
    ) from cause


def _from_models(body: Mapping[str, Any], model: str) -> int | None:
    entries = list(_mappings(body.get("data")))
    named = [entry for entry in entries if entry.get("id") == model]
    for entry in named or (entries if len(entries) == 1 else []):
        for source in (entry, entry.get("meta")):
            if isinstance(source, Mapping):
                for key in (*_MODEL_KEYS, "n_ctx"):
                    if (window := _tokens(source.get(key))) is not None:
                        return window
    return None


def _from_props(body: Mapping[str, Any], model: str) -> int | None:
    settings = body.get("default_generation_settings")
    return _tokens(settings.get("n_ctx")) if isinstance(settings, Mapping) else None


def _from_info(body: Mapping[str, Any], model: str) -> int | None:
    return _tokens(body.get("context_length"))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    return (entry for entry in value if isinstance(entry, Mapping)) if isinstance(value, list) else iter(())


def _tokens(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


_SOURCES = (("/models", _from_models), ("//props", _from_props), ("//get_server_info", _from_info))
