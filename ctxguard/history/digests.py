"""Digests of what a chat template renders of a message, and the chain of them over a history.

Left out are things that agents change without changing the prompt: ids, None fields, ``name``,
``cache_control``, the spelling of JSON arguments, a string against a single text part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from ctxguard.messages import Message, reasoning_of, tool_calls_of
from ctxguard.messages.content import call_arguments, call_name

DIGEST_BYTES = 16
_SHORT = 128  # characters below which hashing is as cheap as looking up


class TextMemo:
    """Remembers a value per string *object*, so that an unchanged history is not hashed again.

    The OpenAI SDK hands over new lists and dicts on every call, but the content strings keep their
    identity. Strings cannot change, and the memo holds a reference to each so that its id is not
    given to another one. Bounded by the characters held; when full, it starts anew.
    """

    def __init__(self, max_characters: int = 64_000_000) -> None:
        self._values: dict[tuple[str, int], tuple[str, bytes]] = {}
        self._characters = 0
        self._max_characters = max_characters

    def get(self, purpose: str, text: str, compute: Callable[[str], bytes]) -> bytes:
        """``compute(text)``, remembered for this very string object and purpose."""
        if len(text) < _SHORT:
            return compute(text)
        key = (purpose, id(text))
        found = self._values.get(key)
        if found is not None and found[0] is text:
            return found[1]
        value = compute(text)
        self._characters += len(text)
        if self._characters > self._max_characters:
            self._values.clear()
            self._characters = len(text)
        self._values[key] = (text, value)
        return value


def digest(*pieces: bytes) -> bytes:
    """Digest of a sequence of byte strings, their borders included."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.digest()


def _text_digest(text: str) -> bytes:
    # A JSON body can carry lone surrogates; they must not raise here.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _arguments_digest(text: str) -> bytes:
    try:
        return _text_digest(_canonical(json.loads(text)))
    except (ValueError, RecursionError):
        return _text_digest(text)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


class Digester:
    """Digests messages and histories; cheap where their strings were seen before."""

    def __init__(self) -> None:
        self._memo = TextMemo()

    def text(self, text: str) -> bytes:
        """Digest of a text."""
        return self._memo.get("text", text, _text_digest)

    def message(self, message: Message) -> bytes:
        """Digest of what a template renders of the message."""
        pieces = [str(message.get("role")).encode(), *self._content(message.get("content"))]
        reasoning = reasoning_of(message)
        if reasoning:
            pieces += [b"reasoning", self.text(reasoning)]
        for call in tool_calls_of(message):
            arguments = call_arguments(call)
            pieces += [b"call", call_name(call).encode("utf-8", "surrogatepass")]
            if isinstance(arguments, str):
                pieces.append(self._memo.get("arguments", arguments, _arguments_digest))
            elif arguments is not None:
                pieces.append(_text_digest(_canonical(arguments)))
        return digest(*pieces)

    def _content(self, content: Any) -> list[bytes]:
        if content is None or content == "":
            return []
        if isinstance(content, str):
            return [b"text", self.text(content)]
        pieces: list[bytes] = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
            if isinstance(text, str):
                pieces += [b"text", self.text(text)]
            else:
                bare = {key: value for key, value in part.items() if key != "cache_control"}
                pieces += [b"part", _text_digest(_canonical(bare))]
        return pieces

    def chain(self, messages: Sequence[Message], seed: bytes) -> list[bytes]:
        """Running digest: element ``i`` stands for the first ``i`` messages (``len + 1`` elements)."""
        links = [seed]
        for message in messages:
            links.append(digest(links[-1], self.message(message)))
        return links
