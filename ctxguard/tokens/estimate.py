"""Estimating tokens from the kinds of characters in a text, with no vocabulary.

A text is read as runs of a kind: words, digits, punctuation, white space, CJK, other scripts. Each run costs
a fixed part and a part for each further character. The costs were fitted on agent trajectories (English,
code, JSON, logs) to the larger of what Qwen3 and OpenAI's o200k_base make of a text, so on average the
estimate is right or a little high for either; digits cost one token each, as Qwen and others encode them one
by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ctxguard.tokens.cache import DigestCache
from ctxguard.tokens.text import encodable

# (what, tokens for each run, tokens for each character in it)
_RUNS: tuple[tuple[re.Pattern[str], float, float], ...] = (
    (re.compile(r"[A-Z]?[a-z]+"), 0.96, 0.0),
    (re.compile(r"(?<=[a-z]{6})[a-z]+"), 0.0, 0.35),  # the tail of a long word, in addition
    (re.compile(r"[A-Z]+(?![a-z])"), 0.6, 0.3),
    (re.compile(r"[0-9]+"), 0.0, 1.0),
    (re.compile(r"[^\S\n](?=[0-9])"), 0.9, 0.0),  # no vocabulary here joins a space to a digit
    (re.compile(r"[!-/:-@\[-`{-~]+"), 0.45, 0.3),
    (re.compile(r"[A-Za-z0-9+/_=-]{40,}"), 0.0, 0.21),  # base64, hashes, paths: in addition
    (re.compile(r"\n{3,}"), 0.0, 0.04),
    (re.compile(r"(?<=[A-Za-z0-9])\s*\n"), 0.6, 0.0),
    (re.compile(r"[^\S\n]{2,}"), 0.9, 0.01),
    (re.compile(r"[\x00-\x08\x0e-\x1b\x7f]"), 1.3, 0.0),
    (re.compile(r"[\x80-\u036f\u0400-\u07ff]+"), 0.3, 0.42),  # two bytes a letter: accents, Cyrillic, Arabic
    (re.compile(r"[\u0370-\u03ff]+"), 0.1, 0.9),  # Greek
    (re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]+"), 0.1, 0.72),  # CJK
    (re.compile(r"[\u0800-\u2e7f\ua000-\uabff\ud7b0-\uf8ff\ufb00-\ufeff\ufff0-\uffff]+"), 0.2, 1.0),
    (re.compile(r"[\U00010000-\U0010ffff]+"), 0.2, 1.7),  # emoji, rare ideographs
)


def estimate_tokens(text: str) -> int:
    """Estimated tokens of ``text``, rounded up; never raises on any ``str``."""
    total = 0.0
    for pattern, per_run, per_character in _RUNS:
        runs = pattern.findall(text)
        if runs:
            total += per_run * len(runs) + (per_character * sum(map(len, runs)) if per_character else 0.0)
    return math.ceil(total) or (1 if text else 0)


class EstimatingCounter:
    """`estimate_tokens`, remembered by text."""

    def __init__(self) -> None:
        self._cache = DigestCache()

    def count(self, text: str) -> int:
        """Estimated tokens of ``text``."""
        key = DigestCache.key(text)
        known = self._cache.get(key)
        if known is None:
            known = estimate_tokens(encodable(text))
            self._cache.put(key, known)
        return known

    def token_starts(self, text: str) -> Sequence[int]:
        """Tokens taken as evenly long."""
        return evenly(text, self.count(text))


def evenly(text: str, tokens: int) -> Sequence[int]:
    """Where each of ``tokens`` tokens begins if all were equally long."""
    return [len(text) * i // tokens for i in range(tokens)]
