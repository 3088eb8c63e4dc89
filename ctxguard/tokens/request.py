"""Which fields of a chat completion request reach the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "documents",
    "reasoning_effort",
)


def request_template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request tells the template: ``chat_template_kwargs`` and the fields that servers add to them.

    As vLLM's ``ChatCompletionRequest.build_chat_params`` does it: the request's own fields win over keys of
    the same name in ``chat_template_kwargs`` (``add_generation_prompt`` and ``continue_final_message`` have
    defaults and so always win), and a ``reasoning_effort`` also sets ``enable_thinking`` unless given.

    Args:
        body: the JSON body of the request, ``extra_body`` merged in.

    Returns:
        What to pass to a counter as ``template_kwargs``.
    """
    kwargs = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in kwargs:
        kwargs["enable_thinking"] = effort != "none"
    for field in ("add_generation_prompt", "continue_final_message"):
        kwargs.pop(field, None)
    kwargs.update((field, body[field]) for field in _FIELDS if body.get(field) is not None)
    return kwargs
