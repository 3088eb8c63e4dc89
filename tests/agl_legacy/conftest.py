"""Tests on Agent Lightning 0.1.2, the version of the report (`make test-agl`)."""

from __future__ import annotations

import agentlightning
import pytest

from tests.agl.conftest import llama_cpp_server, pytest_configure

__all__ = ["llama_cpp_server", "pytest_configure"]

if not agentlightning.__file__ or "agentlightning-0.1.2" not in agentlightning.__file__:
    raise pytest.UsageError(
        "tests/agl_legacy runs with Agent Lightning 0.1.2 first on the path. Use `make test-agl`, which puts it there."
    )
