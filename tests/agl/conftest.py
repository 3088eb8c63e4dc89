"""What the tests with the real Agent Lightning 0.x share: model servers, and quiet for what is not ours."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from ctxguard.testing.llama_cpp import LlamaCppServer
from ctxguard.testing.tiny_model import cache_folder, write_gguf, write_hf_model
from tests.vllm.serve import VllmServer

if importlib.util.find_spec("agentlightning") is None:
    raise pytest.UsageError(
        "tests/agl runs inside the virtualenv of Agent Lightning 0.x; this Python has none. "
        "Use `make test-agl`, which sets that virtualenv up."
    )

WINDOW = 2048


def pytest_configure(config: pytest.Config) -> None:
    """Warnings stay errors where they are given to us; what the hundred packages under Agent Lightning say about
    each other's deprecations, in this process too, is not for us to mend."""
    for line in ("ignore", r"error:::(ctxguard|tests)(\.|$)", "error::pytest.PytestWarning"):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def llama_cpp_server() -> Iterator[LlamaCppServer]:
    """The real llama.cpp server, window 2048: counts and refuses for real, tells no token ids. Ready in 2 s."""
    with LlamaCppServer(write_gguf(cache_folder()), window=WINDOW, slots=4) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[VllmServer]:
    """The real vLLM, window 2048, with ``return_token_ids``. Takes 30 s to start: only for what needs the ids."""
    folder = write_hf_model(cache_folder().with_name(f"tiny-qwen3-hf-{WINDOW}"), WINDOW)
    with VllmServer(folder, window=WINDOW, max_output_tokens=256) as server:
        yield server
