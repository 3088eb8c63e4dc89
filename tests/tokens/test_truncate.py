"""Cutting texts: never over, valid unicode, whatever the counter."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxguard.tokens import ApproximateCounter, ChatTemplateCounter, SegmentCounter, truncate_text
from ctxguard.tokens.estimate import EstimatingCounter
from ctxguard.tokens.segments import EncodeCounter, TextCounter
from ctxguard.tokens.tiktoken import TiktokenTextCounter

WORDS = [
    "word ",
    "日本語",
    "👩‍💻",
    "e\u0301",
    "\n\n",
    "<|im_end|>",
    "x" * 40,
    " " * 30,
    "1234",
    "\ud83d\ude80",
    "é",
]
long_texts = st.builds(
    lambda pieces, times: "".join(pieces) * times, st.lists(st.sampled_from(WORDS) | st.text(max_size=9), max_size=9),
    st.integers(1, 60),
)  # fmt: skip


@pytest.fixture(params=["segments", "tiktoken", "estimate", "encode"])
def counter(request: pytest.FixtureRequest, segments: SegmentCounter) -> TextCounter:
    if request.param == "tiktoken":
        found: TiktokenTextCounter = request.getfixturevalue("tiktoken_text")
        return found
    if request.param == "estimate":
        return EstimatingCounter()
    return segments if request.param == "segments" else EncodeCounter(lambda text: [0] * segments.count(text))


def test_the_result_is_never_over_and_always_head_and_tail(counter: TextCounter) -> None:
    @settings(max_examples=80, deadline=None)
    @given(text=long_texts, limit=st.integers(-1, 120), marker=st.sampled_from(["\n…\n", "", "[cut: 日本]"]))
    @example(text="👩‍💻" * 300, limit=7, marker="\n…\n")
    @example(text=" " * 3000, limit=9, marker="\n…\n")
    @example(text="\ud83d\ude80" * 300, limit=20, marker="")
    def check(text: str, limit: int, marker: str) -> None:
        cut = truncate_text(text, limit, counter, marker=marker)
        if limit <= 0:
            assert cut == ""
            return
        assert counter.count(cut) <= limit
        if counter.count(text) <= limit:
            assert cut == text
            return
        assert len(cut) < len(text) + len(marker)
        if cut and not text.startswith(cut):
            heads = [
                i for i in range(len(cut) + 1) if cut[i:].startswith(marker) and text.startswith(cut[:i])
            ]
            assert any(text.endswith(cut[i + len(marker) :]) for i in heads)
        if not any("\ud800" <= letter <= "\udfff" for letter in text.replace("\ud83d\ude80", "")):
            cut.encode("utf-16", "surrogatepass").decode("utf-16")

    check()


def test_little_room_is_left_unused(segments: SegmentCounter, counter: TextCounter) -> None:
    texts = [
        Path(__file__).read_text() * 20,
        "这是一个关于人工智能的长文本，用于测试截断。" * 800,
        "\n".join(f'{{"id": {i}, "name": "item {i}", "ok": true}}' for i in range(2000)),
    ]
    slacks = [
        limit - counter.count(truncate_text(text, limit, counter))
        for text in texts
        for limit in (50, 200, 1000, 4000)
    ]
    assert min(slacks) >= 0
    assert statistics.median(slacks) <= 3
    assert max(slacks) <= (4 if not isinstance(counter, EstimatingCounter) else 12)


def test_no_replacement_character_appears(segments: SegmentCounter) -> None:
    text = "🏴󠁧󠁢󠁥󠁮󠁧󠁿漢é𝒜" * 400
    for limit in range(4, 60):
        assert "\ufffd" not in truncate_text(text, limit, segments)


def test_a_long_text_is_not_encoded_in_full(segments: SegmentCounter) -> None:
    seen = 0

    class Watched:
        def count(self, text: str) -> int:
            nonlocal seen
            seen += len(text)
            return segments.count(text)

        def token_starts(self, text: str) -> object:
            nonlocal seen
            seen += len(text)
            return segments.token_starts(text)

    text = Path(__file__).read_text() * 70
    cut = truncate_text(text, 1000, Watched())  # type: ignore[arg-type]
    assert segments.count(cut) <= 1000
    assert seen < len(text) / 6, "encoded much more than the windows"


def test_hundreds_of_kilobytes_of_one_character_are_cut_quickly(counter: TextCounter) -> None:
    for letter in ("a", " ", "\n", "🚀", "="):
        start = time.monotonic()
        cut = truncate_text(letter * 200_000, 500, counter)
        assert 0 < counter.count(cut) <= 500
        assert time.monotonic() - start < 20


def test_every_counter_offers_it(qwen: ChatTemplateCounter) -> None:
    text = "many words and numbers 12345 " * 400
    for counter in (qwen, ApproximateCounter(warn=False)):
        cut = counter.truncate(text, 100, marker="[…]")
        assert 90 <= counter.count_text(cut) <= 100
        assert cut.startswith("many words")
        assert "[…]" in cut
        assert cut.endswith("12345 ")
        assert counter.truncate("short", 100) == "short"
