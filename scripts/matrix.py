"""`make test-matrix`: the client's contract against every openai line, and what the peers make of our errors.

    python scripts/matrix.py [NAME …]            all environments, or those named
    python scripts/matrix.py [NAME …] -- ARGS    with more arguments for pytest

Every environment is built (scripts/venvs.py) and run even if an earlier one failed. One that cannot be
built is a failure, not a skip.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import venvs

CONTRACT = ["tests/matrix", "--ignore=tests/matrix/test_peers.py"]
# The peers' own traffic has no place in a test: litellm fetches a price list, the Agents SDK sends traces.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
SHOWN = ("openai", "httpx", "httpx2", "pydantic", "tiktoken", "litellm", "langchain-openai", "openai-agents")


def contract(python: Path, name: str, arguments: list[str]) -> int:
    return _pytest(python, name, CONTRACT + arguments)


def peers(python: Path, name: str, arguments: list[str]) -> int:
    # The peers warn of things of their own (sockets left open, deprecations): shown, but no failure.
    return _pytest(python, name, ["tests/matrix/test_peers.py", "-W", "default", *arguments])


def wheel(python: Path, name: str, arguments: list[str]) -> int:
    """The built wheel, installed without any extra: whole, without tests, and importable."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        made = subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, str(venvs.ROOT)])
        if made.returncode != 0:
            return made.returncode
        (file,) = Path(folder).glob("*.whl")
        names = zipfile.ZipFile(file).namelist()
        strangers = [entry for entry in names if not entry.startswith(("ctxguard/", "ctxguard_sdk-"))]
        if strangers or "ctxguard/py.typed" not in names:
            print(f"the wheel lacks py.typed or holds what it should not: {strangers}")
            return 1
        site = Path(folder) / "site"
        installed = subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(file)])
        if installed.returncode != 0:
            return installed.returncode
        check = """
import importlib.metadata
import ctxguard
from ctxguard._version import __version__
assert importlib.metadata.version("ctxguard-sdk") == __version__
missing = [name for name in getattr(ctxguard, "__all__", []) if not hasattr(ctxguard, name)]
assert not missing, missing
print("1 passed, 0 failed")
"""
        return subprocess.run(
            [str(python), "-W", "error", "-c", check], cwd=folder, env={**os.environ, "PYTHONPATH": str(site)}
        ).returncode


ENVIRONMENTS: dict[str, Callable[[Path, str, list[str]], int]] = {
    "openai-lowest": contract,
    "openai-1": contract,
    "openai-2": contract,
    "openai-3": contract,
    "peers": peers,
    "wheel": wheel,
}


def _pytest(python: Path, name: str, arguments: list[str]) -> int:
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(venvs.ROOT), "CTXGUARD_MATRIX": name}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=venvs.ROOT, env=environment, stdin=subprocess.DEVNULL).returncode


def _versions(python: Path) -> str:
    ask = f"""
import importlib.metadata as m
for name in {SHOWN!r}:
    try: print(name, m.version(name), end="  ")
    except m.PackageNotFoundError: pass
"""
    return subprocess.run([str(python), "-c", ask], capture_output=True, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, rest = arguments[:at], arguments[at + 1 :]
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        print(f"no such environment: {', '.join(unknown)}; there are {', '.join(ENVIRONMENTS)}")
        return 2
    rows: list[tuple[str, str, float, str]] = []
    for name in names or ENVIRONMENTS:
        print(f"\n=== matrix: {name}", flush=True)
        start = time.monotonic()
        try:
            python = venvs.cached(name)
        except venvs.InstallError as error:
            print(error, flush=True)
            rows.append((name, "NOT BUILT", time.monotonic() - start, ""))
            continue
        code = ENVIRONMENTS[name](python, name, rest)
        verdict = "passed" if code == 0 else "NO TESTS" if code == 5 else "FAILED"
        rows.append((name, verdict, time.monotonic() - start, _versions(python)))
    print("\n=== matrix: summary")
    for name, verdict, seconds, versions in rows:
        print(f"{name:14} {verdict:10} {seconds:5.0f} s  {versions}")
    return 0 if all(verdict == "passed" for _, verdict, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
