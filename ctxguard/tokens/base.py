"""What every token counter offers, exact or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]
"""One chat message in OpenAI form: ``{"role": …, "content": …, …}``."""

Tool = Mapping[str, Any]
"""One tool schema in OpenAI form: ``{"type": "function", "function": {…}}``."""


@runtime_checkable
class TokenCounter(Protocol):
    """Counts prompts in tokens, as the serving model sees them.

    Attributes:
        name: what it counts with, for reports, e.g. ``"chat-template(Qwen3)"``.
        exact: True when a count equals the server's ``usage.prompt_tokens``; not so for messages with images,
            audio or files, whose tokens are estimated (see `ctxguard.tokens.has_media`).
        margin: the share by which the true count may exceed the returned one (0.0 when exact).
        fingerprint: changes whenever counts could change (vocabulary, template, normalisation).
    """

    name: str
    exact: bool
    margin: float
    fingerprint: str

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of the whole prompt, generation prompt included.

        Args:
            messages: OpenAI chat messages (mappings); never mutated.
            tools: OpenAI tool schemas sent with the request, or None.
            template_kwargs: what the request passes to the chat template
                (``chat_template_kwargs``, e.g. ``{"enable_thinking": False}``).

        Raises:
            TemplateRefusedError: the chat template refuses these messages.
        """
        ...

    def count_text(self, text: str) -> int:
        """Tokens of a bare text, outside any template. Never raises on any ``str``."""
        ...

    def truncate(self, text: str, max_tokens: int, *, marker: str = "\n…\n") -> str:
        """Head and tail of ``text`` around ``marker``, at most ``max_tokens`` tokens in all.

        A text that already fits comes back as it is. The result is valid unicode (no half
        characters) and never over ``max_tokens``; where not even the marker fits, it is shorter than
        the marker (a head of the text, or ``""``).
        """
        ...


@runtime_checkable
class GivesTokenIds(Protocol):
    """A counter that also knows the token ids of a prompt, not only their number."""

    def ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        """Token ids of the whole prompt, generation prompt included; arguments and errors as of ``count``.

        Of text only: a server puts tokens of its own in the place of images, audio and files.
        """
        ...
