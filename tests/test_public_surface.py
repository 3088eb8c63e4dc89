"""What `import ctxguard` offers is a decision: it changes only on purpose."""

from __future__ import annotations

import subprocess
import sys

import ctxguard


def test_all_names_what_is_there_and_nothing_else():
    public = {
        name
        for name, value in vars(ctxguard).items()
        if not name.startswith("_") and not isinstance(value, type(ctxguard))
    }
    assert public | {"__version__", "__distribution__"} == set(ctxguard.__all__)


def test_it_says_which_distribution_it_is():
    assert ctxguard.__distribution__ == "ctxguard-sdk"


def test_importing_it_loads_no_optional_package():
    heavy = "transformers tokenizers jinja2 agentlightning omegaconf yaml torch litellm"
    code = f"import sys, ctxguard; print([n for n in {heavy.split()} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
