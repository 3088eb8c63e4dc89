"""The real Qwen3 tokenizer and template, built once, and things made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from ctxguard.tokens import ChatTemplateCounter, SegmentCounter
from ctxguard.tokens import tiktoken as tiktoken_module
from ctxguard.tokens.tiktoken import TiktokenTextCounter

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def qwen(qwen3_folder: Path) -> ChatTemplateCounter:
    return ChatTemplateCounter.from_folder(qwen3_folder, name="Qwen3")


@pytest.fixture(scope="session")
def segments(qwen3_folder: Path) -> SegmentCounter:
    return SegmentCounter((qwen3_folder / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def hf_tokenizer(qwen3_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(qwen3_folder)


@pytest.fixture(scope="session")
def qwen_encoding(qwen3_folder: Path) -> tiktoken.Encoding:
    """A tiktoken encoding with a real vocabulary that needs no download (and o200k's pattern for white space)."""
    from ctxguard.testing.tiny_model import _PRE_TOKENIZER_REGEX, _ranks

    return tiktoken.Encoding(
        "qwen",
        pat_str=_PRE_TOKENIZER_REGEX,
        mergeable_ranks=_ranks(),
        special_tokens={"<|endoftext|>": 151643},
    )


@pytest.fixture(scope="session")
def tiktoken_text(qwen_encoding: tiktoken.Encoding) -> TiktokenTextCounter:
    return TiktokenTextCounter(qwen_encoding)


@pytest.fixture
def o200k(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """OpenAI's own vocabulary, from ../shared or wherever tiktoken has cached it."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ and (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    if not any(tiktoken_module.cache_folder().glob("fb374d419588a4632f3f557e76b4b70aebbca790*")):
        pytest.skip("the vocabulary o200k_base is not on this machine")
    tiktoken_module._load.cache_clear()
    yield
    tiktoken_module._load.cache_clear()


def recorded(name: str) -> list[dict[str, Any]]:
    """The lines of a file in ``tests/tokens/data``."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
