"""A bounded memory from text to a number, which keeps no text."""

from __future__ import annotations

from hashlib import blake2b

DEFAULT_SIZE = 65_536


class DigestCache:
    """Least-recently-used map from a text's 16-byte digest to an int.

    Every operation is a single dict operation or tolerates losing a race, so that threads may share one:
    the worst that can happen is that something is counted twice.
    """

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._size = size
        self._known: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._known)

    @staticmethod
    def key(text: str, tag: bytes = b"") -> bytes:
        """The key of ``text``; ``tag`` keeps apart what must be counted differently."""
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=tag).digest()

    def get(self, key: bytes) -> int | None:
        """The number, which thereby becomes the newest; None where it is unknown."""
        value = self._known.pop(key, None)
        if value is not None:
            self._known[key] = value
        return value

    def put(self, key: bytes, value: int) -> None:
        """Remember a number and forget the oldest ones over the bound."""
        self._known[key] = value
        while len(self._known) > self._size:
            try:
                self._known.pop(next(iter(self._known)), None)
            except (StopIteration, RuntimeError):  # another thread changed it between iter and next
                return
