"""What the tests with the real Agent Lightning 1.0 share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from ctxguard.testing.llama_cpp import LlamaCppServer
from ctxguard.testing.tiny_model import cache_folder, write_gguf, write_tokenizer
from tests.agl1.rig import Agl1

if importlib.util.find_spec("agentlightning") is None:
    raise pytest.UsageError(
        "tests/agl1 runs inside the virtualenv of Agent Lightning 1.0; this Python has none. "
        "Use `make test-agl1`, which sets that virtualenv up."
    )

WINDOW = 256


@pytest.fixture(scope="session")
def llama_cpp_server() -> Iterator[LlamaCppServer]:
    """The real llama.cpp server, window 256: counts and refuses for real, tells no token ids."""
    with LlamaCppServer(write_gguf(cache_folder()), window=WINDOW, slots=2) as server:
        yield server


@pytest.fixture(scope="session")
def agl1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agl1]:
    """The real agl-server and agl-controller. The agents have the tokenizer of the tiny model."""
    tokenizer = write_tokenizer(cache_folder())
    with Agl1(tmp_path_factory.mktemp("agl1"), environment={"TOKENIZER": str(tokenizer)}) as running:
        yield running


@pytest.fixture
def server_only(tmp_path: object) -> Iterator[Agl1]:
    """The real agl-server without a controller: a test plays the agents."""
    with Agl1(tmp_path, runs_agents=False) as running:  # type: ignore[arg-type]
        yield running
