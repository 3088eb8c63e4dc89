"""Fixtures that several folders of tests share. What they need is imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ctxguard.testing.llama_cpp import LlamaCppServer


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """A folder with the real Qwen3 ``tokenizer.json`` and ``chat_template.jinja``, kept between runs."""
    from ctxguard.testing.tiny_model import cache_folder, write_tokenizer

    return write_tokenizer(cache_folder())


@pytest.fixture(scope="session")
def llama_server() -> Iterator[LlamaCppServer]:
    """The real llama.cpp server with the tiny Qwen3: 4 slots, each with a window of 2048 tokens."""
    from ctxguard.testing.llama_cpp import LlamaCppServer
    from ctxguard.testing.tiny_model import cache_folder, write_gguf

    with LlamaCppServer(write_gguf(cache_folder()), window=2048, slots=4) as server:
        yield server
