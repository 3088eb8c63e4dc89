"""The vLLM server that all tests of this folder share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    raise pytest.UsageError(
        "tests/vllm runs inside the vLLM virtualenv, where `import vllm` works; this Python has no vllm. "
        "Use `make test-vllm`, which sets that virtualenv up."
    )

WINDOW = 2048


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory):
    """The real vLLM with the tiny Qwen3 and a window of 2048 tokens.

    It has ``base_url``, ``url``, ``model``, ``window`` and ``model_folder`` (tokenizer and chat template).
    """
    from ctxguard.testing.tiny_model import cache_folder, write_hf_model

    serve = _launcher()
    folder = write_hf_model(cache_folder().with_name(f"tiny-qwen3-hf-{WINDOW}"), WINDOW)
    with serve.VllmServer(folder, window=WINDOW) as server:
        yield server


def _launcher():
    """The module next to this file; tests are no package to import it from in every import mode."""
    path = Path(__file__).with_name("serve.py")
    spec = importlib.util.spec_from_file_location("ctxguard_vllm_serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
