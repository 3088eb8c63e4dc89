"""What images, audio and files in a message cost: stated estimates, never the length of their base64.

Providers count media by size in pixels or seconds, which a message does not tell without decoding it.
So an image is counted as the largest that one image can be:

- OpenAI, models that count tiles (gpt-4o, gpt-4.1, gpt-4.5): an image is scaled into 2048 x 2048 and its
  short side to 768, so it has at most 4 x 2 tiles: 85 + 8 x 170 = 1445 tokens; ``detail: low`` is 85
  (platform.openai.com, "Images and vision", "Calculating costs").
- Served vision models: up to the processor's ``max_pixels``. Qwen2.5-VL's default of 12,845,056 pixels is
  16,384 tokens; most deployments lower it. Pass the counter ``image_tokens=…`` to say yours.

Audio is 10 tokens a second (OpenAI: one token for each 100 ms of user audio); the seconds are taken from the
size as if at 32 kbit/s, so any usual format takes less. A file counts like plain text of its size, four bytes
a token, and at least like one image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

IMAGE_TOKENS = 1445
LOW_DETAIL_TOKENS = 85
_AUDIO_BYTES_PER_TOKEN = 400
_FILE_BYTES_PER_TOKEN = 4

_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "audio": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "video": "video",
    "file": "file",
    "input_file": "file",
}


def media_kind(part: Any) -> str | None:
    """``"image"``, ``"audio"``, ``"video"`` or ``"file"`` for such a content part, else None."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if kind is None or part.get("uuid") is not None:  # vLLM also takes parts without a type
        return next((_KINDS[key] for key in part if key in _KINDS), None)
    return None


def media_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``(kind, part)`` for each content part that is not text."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            for part in content:
                kind = media_kind(part)
                if kind is not None:
                    yield kind, part


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some content part is an image, audio, video or file, whose tokens are only estimated.

    A count of such messages is not exact, even where the counter's ``exact`` is True.
    """
    return next(media_parts(messages), None) is not None


def media_tokens(messages: Sequence[Mapping[str, Any]], image_tokens: int = IMAGE_TOKENS) -> int:
    """Upper estimate for all media in these messages, in tokens (see the module's docstring)."""
    return sum(_part_tokens(kind, part, image_tokens) for kind, part in media_parts(messages))


def _part_tokens(kind: str, part: Mapping[str, Any], image_tokens: int) -> int:
    if kind == "image":
        image = part.get("image_url")
        detail = image.get("detail") if isinstance(image, Mapping) else part.get("detail")
        return min(LOW_DETAIL_TOKENS, image_tokens) if detail == "low" else image_tokens
    if kind == "audio":
        return max(1, _payload_bytes(part) // _AUDIO_BYTES_PER_TOKEN)
    if kind == "file":
        return max(image_tokens, _payload_bytes(part) // _FILE_BYTES_PER_TOKEN)
    return 16 * image_tokens  # a video: no published rule; as sixteen frames


def _payload_bytes(value: Any) -> int:
    """Bytes behind the longest string in a part (base64 holds three bytes in four letters)."""
    if isinstance(value, str):
        return len(value) * 3 // 4
    if isinstance(value, Mapping):
        return max(map(_payload_bytes, value.values()), default=0)
    return 0
