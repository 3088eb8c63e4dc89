"""From a model name, and whatever the user has of the model, to the best counter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctxguard.errors import CounterError
from ctxguard.tokens.approximate import ApproximateCounter
from ctxguard.tokens.base import TokenCounter
from ctxguard.tokens.chat_template import ChatTemplateCounter, Dialect
from ctxguard.tokens.tiktoken import TiktokenCounter, is_openai_chat_model


def counter_for(
    model: str,
    *,
    tokenizer: Any = None,
    template: str | Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    dialect: Dialect = "vllm",
    image_tokens: int | None = None,
) -> TokenCounter:
    """The best counter for a model.

    Args:
        model: the model's name; without a tokenizer it decides: OpenAI's chat models are counted with
            tiktoken, any other with an estimate and one warning.
        tokenizer: for exact counts: a transformers tokenizer, the path of a model folder, or the path of a
            ``tokenizer.json`` (then with ``template``, unless one lies next to it).
        template: text or path of the chat template that the server uses, if not the model's own.
        template_kwargs: the server's ``--default-chat-template-kwargs``.
        dialect: ``"vllm"`` or ``"llama.cpp"``.
        image_tokens: what one image counts, at most.

    Raises:
        CounterError: what was given is not a tokenizer, cannot be read, or has no chat template.
    """
    options: dict[str, Any] = {} if image_tokens is None else {"image_tokens": image_tokens}
    if tokenizer is None:
        if template is not None or template_kwargs:
            raise CounterError(
                f"a chat template was given for {model!r} and no tokenizer: pass tokenizer=… too "
                "(a model folder, the path of a tokenizer.json, or a transformers tokenizer)"
            )
        if is_openai_chat_model(model):
            return TiktokenCounter(model, image_tokens=image_tokens)
        return ApproximateCounter(model, **options)
    options.update(template_kwargs=template_kwargs, dialect=dialect, name=model or "model")
    if not isinstance(tokenizer, str | Path):
        return ChatTemplateCounter.from_tokenizer(tokenizer, template=template, **options)
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return ChatTemplateCounter.from_folder(path, template=template, **options)
    if not path.exists():
        raise CounterError(
            f"tokenizer={str(tokenizer)!r} is no file or folder here: pass the path of a downloaded model's "
            "folder or of a tokenizer.json, or a transformers tokenizer (AutoTokenizer.from_pretrained(…))"
        )
    if template is not None:
        return ChatTemplateCounter.from_files(path, template, **options)
    if path.name == "tokenizer.json":
        return ChatTemplateCounter.from_folder(path.parent, **options)
    raise CounterError(f"tokenizer={str(tokenizer)!r} has no chat template with it: pass template=… as well")
