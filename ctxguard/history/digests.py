"""Digests of what a chat template renders of a message, and the chain of them over a history.

Left out are things that agents change without changing the prompt: ids, None fields, ``name``,
``cache_control``, the spelling of JSON arguments, a string against a single text part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from ctxguard.messages import Message, part_texts, reasoning_of, tool_calls_of
from ctxguard.messages.content import call_arguments, call_name

DIGEST_BYTES = 16


class MessageMemo:
    """Remembers the digest of a message by the identity of its strings.

    The OpenAI SDK hands over new lists and dicts on every call, but the strings in them keep their
    identity. Strings cannot change, so an edit in place brings another string; the memo holds a
    reference to each so that its id is not given to another one. Bounded by the characters held; when
    full, it starts anew.
    """

    def __init__(self, max_characters: int = 64_000_000) -> None:
        self._digests: dict[tuple[Any, ...], tuple[list[str], bytes]] = {}
        self._characters = 0
        self._max_characters = max_characters

    def get(self, message: Message, compute: Callable[[Message], bytes]) -> bytes:
        """``compute(message)``, remembered for these very strings."""
        strings: list[str] = []
        shape = _shape(message, strings)
        if shape is None:
            return compute(message)
        key = (*shape, *map(id, strings))
        found = self._digests.get(key)
        if found is None:
            self._characters += sum(map(len, strings))
            if self._characters > self._max_characters:
                self._digests.clear()
                self._characters = sum(map(len, strings))
            found = self._digests[key] = (strings, compute(message))
        return found[1]


def _shape(message: Message, strings: list[str]) -> tuple[Any, ...] | None:
    """How a message is built up from strings, which are appended; None where it holds anything else."""
    content = message.get("content")
    reasoning = reasoning_of(message)
    texts = part_texts(message)
    calls = tool_calls_of(message)
    for call in calls:
        arguments = call_arguments(call)
        if not isinstance(arguments, str):
            return None
        strings += (call_name(call), arguments)
    if any(text is None for text in texts):
        return None
    strings += [text for text in texts if text is not None]
    if reasoning:
        strings.append(reasoning)
    return (message.get("role"), content is None or isinstance(content, str), len(texts), len(calls))


def digest(*pieces: bytes) -> bytes:
    """Digest of a sequence of byte strings, their borders included."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        state.update(len(piece).to_bytes(8, "little"))
        state.update(piece)
    return state.digest()


def text_digest(text: str) -> bytes:
    """Digest of a text."""
    # A JSON body can carry lone surrogates; they must not raise here.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def _arguments_digest(text: str) -> bytes:
    try:
        return text_digest(_canonical(json.loads(text)))
    except (ValueError, RecursionError):
        return text_digest(text)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


class Digester:
    """Digests messages and histories; cheap where their strings were seen before."""

    def __init__(self) -> None:
        self._memo = MessageMemo()

    def message(self, message: Message) -> bytes:
        """Digest of what a template renders of the message."""
        return self._memo.get(message, self._message)

    def _message(self, message: Message) -> bytes:
        pieces = [str(message.get("role")).encode(), *self._content(message.get("content"))]
        reasoning = reasoning_of(message)
        if reasoning:
            pieces += [b"reasoning", text_digest(reasoning)]
        for call in tool_calls_of(message):
            arguments = call_arguments(call)
            pieces += [b"call", call_name(call).encode("utf-8", "surrogatepass")]
            if isinstance(arguments, str):
                pieces.append(_arguments_digest(arguments))
            elif arguments is not None:
                pieces.append(text_digest(_canonical(arguments)))
        return digest(*pieces)

    @staticmethod
    def _content(content: Any) -> list[bytes]:
        if content is None or content == "":
            return []
        if isinstance(content, str):
            return [b"text", text_digest(content)]
        pieces: list[bytes] = []
        for part in content:
            text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
            if isinstance(text, str):
                pieces += [b"text", text_digest(text)]
            else:
                bare = {key: value for key, value in part.items() if key != "cache_control"}
                pieces += [b"part", text_digest(_canonical(bare))]
        return pieces

    def chain(self, messages: Sequence[Message], seed: bytes) -> list[bytes]:
        """Running digest: element ``i`` stands for the first ``i`` messages (``len + 1`` elements)."""
        links = [seed]
        for message in messages:
            links.append(digest(links[-1], self.message(message)))
        return links
