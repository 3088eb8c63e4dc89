"""From what the user has to the best counter, or an error that says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ctxguard.errors import CounterError
from ctxguard.tokens import (
    ApproximateCounter,
    ApproximateCountWarning,
    ChatTemplateCounter,
    TiktokenCounter,
    approximate,
    counter_for,
)
from tests.doubles import user


def test_a_tokenizer_in_any_form_gives_the_exact_counter(qwen3_folder: Path, hf_tokenizer: Any) -> None:
    template = qwen3_folder / "chat_template.jinja"
    forms: list[dict[str, Any]] = [
        {"tokenizer": qwen3_folder},
        {"tokenizer": str(qwen3_folder)},
        {"tokenizer": qwen3_folder / "tokenizer.json"},
        {"tokenizer": qwen3_folder / "tokenizer.json", "template": template},
        {"tokenizer": str(qwen3_folder / "tokenizer.json"), "template": template.read_text()},
        {"tokenizer": qwen3_folder, "template": str(template)},
        {"tokenizer": hf_tokenizer},
    ]
    for form in forms:
        counter = counter_for("Qwen3", **form)
        assert isinstance(counter, ChatTemplateCounter)
        assert counter.count([user("hi")]) == 9
        assert counter.name == "chat-template(Qwen3)"


def test_options_reach_the_counter(qwen3_folder: Path) -> None:
    counter = counter_for(
        "m",
        tokenizer=qwen3_folder,
        template_kwargs={"enable_thinking": False},
        dialect="llama.cpp",
        image_tokens=5,
    )
    assert isinstance(counter, ChatTemplateCounter)
    assert counter.dialect == "llama.cpp"
    assert counter.count([user("hi")]) == 13


@pytest.mark.usefixtures("o200k")
def test_openai_models_are_counted_with_tiktoken() -> None:
    assert isinstance(counter_for("gpt-4o"), TiktokenCounter)


def test_other_models_are_estimated_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximate, "_warned", set())
    with pytest.warns(ApproximateCountWarning, match="my-model"):
        assert isinstance(counter_for("my-model"), ApproximateCounter)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": "/no/such/folder"}, "/no/such/folder"),
        ({"tokenizer": "Qwen/Qwen3-8B"}, "downloaded model"),
        ({"tokenizer": 7}, "int is not a tokenizer"),
        ({"template": "{{ messages }}"}, "no tokenizer"),
        ({"tokenizer": __file__}, "no chat template"),
        ({"tokenizer": __file__, "template": "{{ messages }}"}, r"not a tokenizer\.json"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_an_error(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CounterError, match=words):
        counter_for("m", **options)
