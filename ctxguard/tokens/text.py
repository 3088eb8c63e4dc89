"""Text as a server can receive it."""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def sendable(text: str) -> str:
    """``text`` without what UTF-8 cannot carry.

    A lone surrogate cannot be sent: the OpenAI SDK's ``json.dumps(…, ensure_ascii=False).encode()`` raises
    on it. So that counting never raises, it is counted as U+FFFD; two surrogates that make up a
    character are counted as that character, as a JSON round trip would join them.
    """
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def encodable(text: str) -> str:
    """The same, keeping every character at its index."""
    return _SURROGATE.sub("\ufffd", text)


def whole_pair(text: str, index: int) -> int:
    """``index``, moved off the middle of a surrogate pair."""
    if (
        0 < index < len(text)
        and "\ud800" <= text[index - 1] <= "\udbff"
        and "\udc00" <= text[index] <= "\udfff"
    ):
        return index - 1
    return index
