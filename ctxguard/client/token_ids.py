"""Reading the token ids of an answer, in the forms that servers give them.

vLLM with ``return_token_ids``: ``prompt_token_ids`` beside the choices, ``token_ids`` in each choice; of a
stream, the prompt's with the first chunk and the generated ones chunk by chunk. LiteLLM moves what it does
not know into ``provider_specific_fields``. Agent Lightning's instrumented vLLM, for versions before 0.10.2:
``response_token_ids``, one list for each choice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import openai

from ctxguard.effects import TokenIds


def read_ids(body: Any, ids: TokenIds) -> None:
    """Take the token ids out of an answer or a chunk of one. Never raises; of several choices the first."""
    choices = _get(body, "choices")
    first = choices[0] if isinstance(choices, Sequence) and choices else None
    prompt = _ids(_get(body, "prompt_token_ids")) or _ids(_get(first, "prompt_token_ids"))
    generated = _ids(_get(first, "token_ids"))
    if generated is None:
        generated = _ids(_get(_get(first, "provider_specific_fields"), "token_ids"))
    if generated is None:
        of_choices = _get(body, "response_token_ids")
        if isinstance(of_choices, Sequence) and of_choices:
            generated = _ids(of_choices[0])
    ids.read(prompt, generated)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _ids(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return None
    return value


def reading_stream(stream_cls: Any, ids: TokenIds) -> Any:
    """A subclass of the SDK's stream class that reads the token ids of the chunks that it hands on.

    The ids are complete when the stream has been read to its end.
    """
    base: Any = stream_cls
    if issubclass(getattr(stream_cls, "__origin__", stream_cls), openai.AsyncStream):

        class AsyncReading(base):  # type: ignore[misc]
            async def __stream__(self) -> AsyncIterator[Any]:
                chunks = super().__stream__()
                try:
                    async for chunk in chunks:
                        read_ids(chunk, ids)
                        yield chunk
                finally:
                    await chunks.aclose()
                ids.complete()

        return AsyncReading

    class Reading(base):  # type: ignore[misc]
        def __stream__(self) -> Iterator[Any]:
            chunks = super().__stream__()
            try:
                for chunk in chunks:
                    read_ids(chunk, ids)
                    yield chunk
            finally:
                chunks.close()
            ids.complete()

    return Reading
