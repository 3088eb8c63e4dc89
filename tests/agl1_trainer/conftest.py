"""What the tests with the trainer side of Agent Lightning 1.0.2 and verl 0.8 share. No GPU, no Ray workers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from ctxguard.testing.tiny_model import cache_folder, write_hf_model, write_tokenizer
from tests.agl1.players import Players
from tests.agl1.rig import Agl1
from tests.vllm.serve import VllmServer

if importlib.util.find_spec("agentlightning.verl.rollout_adapter") is None or not os.environ.get(
    "CTXGUARD_AGL1_PYTHON"
):
    raise pytest.UsageError(
        "tests/agl1_trainer needs agentlightning 1.0 and verl 0.8 on PYTHONPATH, and CTXGUARD_AGL1_PYTHON, a Python "
        "with agl-server. Use `make test-agl1`, which sets all of it up."
    )

WINDOW = 2048


def pytest_configure(config: pytest.Config) -> None:
    """Warnings stay errors where they are given to us; what the hundred packages under verl say about each other's
    deprecations, in this process too, is not for us to mend."""
    for line in ("ignore", r"error:::(ctxguard|tests)(\.|$)", "error::pytest.PytestWarning"):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def vllm_server() -> Iterator[VllmServer]:
    """The real vLLM, window 2048; it returns token ids. Takes 30 s to start: only for what needs it."""
    folder = write_hf_model(cache_folder().with_name(f"tiny-qwen3-hf-{WINDOW}"), WINDOW)
    with VllmServer(folder, window=WINDOW) as server:
        yield server


@pytest.fixture(scope="session")
def agl1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agl1]:
    """The real agl-server and agl-controller; the agents are processes."""
    tokenizer = write_tokenizer(cache_folder())
    with Agl1(tmp_path_factory.mktemp("agl1"), environment={"TOKENIZER": str(tokenizer)}) as running:
        yield running


@pytest.fixture(scope="session")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Players]:
    """The real agl-server, and somebody who plays its agents."""
    with Agl1(tmp_path_factory.mktemp("server"), runs_agents=False) as running, Players(running) as playing:
        yield playing


@pytest.fixture(scope="session")
def server(players: Players) -> Agl1:
    """The real agl-server; the agents are played."""
    return players.server
