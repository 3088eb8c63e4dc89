"""Counting by segment equals encoding in full, for every rule that a tokenizer may have."""

from __future__ import annotations

import base64
import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard.errors import CounterError
from ctxguard.tokens import SegmentCounter
from ctxguard.tokens.cache import DigestCache
from ctxguard.tokens.segments import _longest_match

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "<|im_",
    "im_end|>",
]
PIECES = [
    *SPECIAL,
    " ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "word",
    " word",
    "日本",
    "e\u0301",
    "Å",
    "👩‍💻",
    "12",
    "'s",
    "\x00",
    "\u3000",
]
dirty = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=dirty)
def test_equals_the_full_encoding_of_any_text(segments: SegmentCounter, text: str) -> None:
    assert segments.reason is None
    assert segments.count(text) == segments.full_count(text)


def synthetic(added: list[dict[str, Any]], **parts: Any) -> SegmentCounter:
    """A small byte-level tokenizer with the given added tokens and other parts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), "▁"})
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    merges = [("w", "o"), ("wo", "r"), ("Ġ", "a"), ("Ġ", "Ġ"), ("▁", "a"), ("Ċ", "Ċ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    rules = json.loads(tokenizer.to_str())
    rules["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": True,
    }
    rules["added_tokens"] = [
        {"id": len(vocab) + i, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True, **token}
        for i, token in enumerate(added)
    ]  # fmt: skip
    rules.update(parts)
    return SegmentCounter(json.dumps(rules))


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
RULES = {
    "plain": ([{"content": "<s>"}, {"content": "<s><s>"}], {}),
    "rstrip": ([{"content": "<s>", "rstrip": True}, {"content": "</s>"}], {}),
    "lstrip": ([{"content": "<s>", "lstrip": True}, {"content": "</s>", "rstrip": True}], {}),
    "both": ([{"content": "<s>", "lstrip": True, "rstrip": True}, {"content": "</s>", "lstrip": True}], {}),
    "normalized, no normaliser": ([{"content": "<s>", "normalized": True}, {"content": "s>a"}], {}),
    "first segment": ([{"content": "<s>"}, {"content": "</s>"}], {"pre_tokenizer": METASPACE}),
    "first segment, strips": (
        [{"content": "</s>"}, {"content": "<s>", "rstrip": True}],
        {"pre_tokenizer": METASPACE},
    ),
}
UNPROVEN = {
    "single_word": ([{"content": "<s>", "single_word": True}], {}),
    "normalized": ([{"content": "<s>", "normalized": True}], {"normalizer": {"type": "NFC"}}),
    "space at the edge": (
        [{"content": "<s> ", "normalized": False}, {"content": "</s>", "rstrip": True}],
        {},
    ),
    "no neutral token": ([{"content": "<s>", "rstrip": True}], {"pre_tokenizer": METASPACE}),
}
small = st.lists(
    st.sampled_from(
        ["<s>", "</s>", "<s", ">", " ", "\n", "\x1c", "\xa0", "a", "wor", "é", " a", "\u3000", "/s>"]
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("name", [*RULES, *UNPROVEN])
def test_equals_the_full_encoding_under_the_rule(name: str) -> None:
    added, parts = {**RULES, **UNPROVEN}[name]
    counter = synthetic(added, **parts)
    assert (counter.reason is None) == (name in RULES)

    @settings(max_examples=150, deadline=None)
    @given(text=small)
    def check(text: str) -> None:
        assert counter.count(text) == counter.full_count(text)

    check()


def test_the_longest_added_token_wins() -> None:
    pattern = re.compile(_longest_match(["ab", "abcd", "abx", "b", "a.c"]))
    assert pattern.findall("abcabcdabxba.cb") == ["ab", "abcd", "abx", "b", "a.c", "b"]


@pytest.mark.parametrize("text", ["a" * 300_000, " " * 1_000_000, "🚀" * 100_000, "漢" * 100_000])
def test_up_to_a_megabyte_of_one_character_is_counted(segments: SegmentCounter, text: str) -> None:
    assert 0 < segments.count(text) <= len(text.encode())


def test_base64_and_lone_surrogates_are_counted(segments: SegmentCounter) -> None:
    assert segments.count(base64.b64encode(random.Random(0).randbytes(200_000)).decode()) > 100_000
    assert segments.count("a\ud800b\udfff") == segments.count("a\ufffdb\ufffd")
    assert segments.count("\ud83d\ude80") == segments.count("🚀")
    assert len(segments.token_starts("a\ud800 \ud83d\ude80")) > 0


def test_a_saved_truncation_does_not_cut_counts(segments: SegmentCounter) -> None:
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert synthetic([], truncation=cut).count("a b c d e f g") > 3


def test_what_is_no_tokenizer_is_an_error() -> None:
    with pytest.raises(CounterError, match=r"not a tokenizer\.json"):
        SegmentCounter("{}")


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = DigestCache(size=2)
    a, b, c = map(DigestCache.key, "abc")
    cache.put(a, 1)
    cache.put(b, 2)
    assert cache.get(a) == 1
    cache.put(c, 3)
    assert (cache.get(a), cache.get(b), cache.get(c)) == (1, None, 3)
    assert len(cache) == 2
    assert DigestCache.key("a") != DigestCache.key("a", b"inside")
