"""The estimate: how far it is from the truth, measured on real trajectories, and its one warning."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.tokens import (
    ApproximateCounter,
    ApproximateCountWarning,
    ChatTemplateCounter,
    TiktokenCounter,
    TokenCounter,
    approximate,
    has_media,
)
from ctxguard.tokens.estimate import estimate_tokens
from ctxguard.tokens.media import media_tokens
from tests.doubles import assistant, call, user

from .conftest import SHARED


def prompts() -> list[tuple[list[dict[str, Any]], Any]]:
    """As an agent would send them: every third trajectory, cut before its first, middle and last assistant message."""
    found = []
    with gzip.open(SHARED / "trajectories.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, 0, None, 3):
            row = json.loads(line)
            messages = row["messages"]
            ends = [i for i, m in enumerate(messages) if i and m["role"] == "assistant"] or [len(messages)]
            found += [(messages[:end], row["tools"]) for end in {ends[0], ends[len(ends) // 2], ends[-1]}]
    return found


@pytest.mark.skipif(not (SHARED / "trajectories.jsonl.gz").is_file(), reason="../shared/data is not there")
@pytest.mark.usefixtures("o200k")
def test_the_true_count_is_within_the_margin_for_999_of_1000_prompts(qwen: ChatTemplateCounter) -> None:
    estimate, openai = ApproximateCounter(warn=False), TiktokenCounter("gpt-4o")
    ratios: dict[str, list[float]] = {"qwen": [], "openai": []}
    for messages, tools in prompts():
        estimated = estimate.count(messages, tools=tools)
        ratios["qwen"].append(qwen.count(messages, tools=tools) / estimated)
        ratios["openai"].append(openai.count(messages, tools=tools) / estimated)
    for name, values in ratios.items():
        within = sum(value <= 1 + estimate.margin for value in values) / len(values)
        print(
            f"{name}: {len(values)} prompts, true/estimate mean {sum(values) / len(values):.3f}, max {max(values):.3f}"
        )
        assert within >= 0.999, name
        assert sum(values) / len(values) > 0.75, f"{name}: wastes too much"


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog. " * 20,
        "def f(x):\n    return [y ** 2 for y in range(x) if y % 3]\n" * 20,
        "今天天气很好，我们去公园散步，然后讨论人工智能的发展。" * 20,
        "Сегодня хорошая погода, и мы пойдём гулять в парк. " * 20,
        '{"id": 12345, "name": "item", "tags": ["a", "b"], "ok": true}\n' * 20,
        "550e8400-e29b-41d4-a716-446655440000\n" * 20,
        base64.b64encode(random.Random(0).randbytes(900)).decode(),
    ],
)
def test_is_sane_on(text: str, qwen: ChatTemplateCounter) -> None:
    true = qwen.count_text(text)
    assert true <= estimate_tokens(text) * 1.15
    assert estimate_tokens(text) <= true * 1.4


@given(text=st.text(st.characters()))
def test_never_raises_and_counts_something(text: str) -> None:
    assert 0 <= estimate_tokens(text) <= 4 * len(text) + 1


def test_is_a_counter_that_says_it_estimates() -> None:
    counter = ApproximateCounter("some-model", warn=False)
    assert isinstance(counter, TokenCounter)
    assert (counter.exact, counter.margin) == (False, 0.15)
    assert counter.name == "approximate(some-model)"


def test_all_that_is_sent_is_counted() -> None:
    counter = ApproximateCounter(warn=False)
    base = counter.count([user("hi"), assistant(content="x")])
    assert counter.count([user("hi"), assistant(content="x", reasoning_content="because of that")]) > base
    assert counter.count([user("hi"), assistant(call("c", "read", '{"path": "a"}'), content="x")]) > base + 18
    assert counter.count([user("hi"), assistant(call("c", "read", {"path": "a"}), content="x")]) > base + 18  # type: ignore[arg-type]
    assert (
        counter.count([user("hi"), assistant(content="x")], tools=[{"function": {"name": "f"}}]) > base + 140
    )


def test_warns_once_for_each_model_and_tells_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "_warned", set())
    with pytest.warns(ApproximateCountWarning, match=r"'m1'.*tokenizer="):
        ApproximateCounter("m1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ApproximateCounter("m1")
        ApproximateCounter("m2", warn=False)
    with pytest.warns(ApproximateCountWarning, match="'m2'"):
        ApproximateCounter("m2")


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


@pytest.mark.parametrize(
    ("part", "tokens"),
    [
        (IMAGE, 1445),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}, 85),
        ({"type": "input_audio", "input_audio": {"data": "A" * 400_000, "format": "wav"}}, 750),
        ({"type": "file", "file": {"file_data": "A" * 40_000}}, 7500),
        ({"type": "file", "file": {"file_id": "file-1"}}, 1445),
        ({"image_url": "https://example.org/a.png"}, 1445),
        ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, 16 * 1445),
    ],
)
def test_media_count_by_a_stated_rule_and_never_as_text(part: dict[str, Any], tokens: int) -> None:
    messages = [user([{"type": "text", "text": "look"}, part])]
    assert has_media(messages)
    assert media_tokens(messages) == tokens
    counter = ApproximateCounter(warn=False)
    assert counter.count(messages) == counter.count([user("look")]) + tokens


def test_text_is_no_media() -> None:
    assert not has_media([user("x"), user([{"type": "text", "text": "a"}, "b"]), user(None)])
