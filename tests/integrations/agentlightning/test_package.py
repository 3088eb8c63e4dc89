"""What the package offers, and that it does so without Agent Lightning."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from ctxguard.integrations import agentlightning as package


def test_it_imports_without_agent_lightning():
    code = (
        "import sys; sys.modules['agentlightning'] = None\n"
        "import ctxguard.integrations.agentlightning as package\n"
        "assert package.mark_failures and package.guarded_client\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_classes_say_what_is_missing():
    if importlib.util.find_spec("agentlightning") is not None:
        pytest.skip("this virtualenv has Agent Lightning")
    for name in ("FailureMarkHook", "MarkingClient"):
        with pytest.raises(ModuleNotFoundError, match="agentlightning"):
            getattr(package, name)


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'Hook'"):
        package.Hook  # noqa: B018
