"""Makes the virtualenvs of `make`, with nothing but the standard library.

    python scripts/venvs.py project PATH EXTRA   this package, editable, with an extra, at PATH
    python scripts/venvs.py cached NAME          .ci/requirements/NAME.txt, in the user's cache

Each prints the path of the environment's Python on stdout; all else goes to stderr and to a log. An
environment that is there and whole is left alone, which takes a fraction of a second. What a broken
install leaves behind is never taken for whole: the stamp is written last.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / ".ci" / "requirements"
# What pip cannot be told in one call, a requirements file says in comments: packages that others pull in and
# that break them; packages whose own requirements contradict the rest and are not needed here; other versions
# of a package, in a folder of their own under `apart/`, for PYTHONPATH.
UNINSTALL = re.compile(r"^# then uninstall: (.+)$", re.MULTILINE)
BARE = re.compile(r"^# then install without dependencies: (.+)$", re.MULTILINE)
APART = re.compile(r"^# then install apart in (\S+): (.+)$", re.MULTILINE)
TRIES = 2


class InstallError(Exception):
    """An environment could not be made."""


def project(path: Path, extra: str) -> Path:
    """This package, editable, with an extra. An environment made for another extra is added to."""
    python = _python_of(path)
    key = _key(str(ROOT), extra, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    with _lock(path):
        stamp, half_made = path / f".ctxguard-{extra}", path / ".ctxguard-installing"
        if not half_made.exists() and _holds(stamp, key) and python.exists():
            return python
        log = path.with_name(f"{path.name}.log")
        if half_made.exists() or _version_in(path) != _version():
            _create(path, log)
        half_made.touch()
        _install(python, ["--editable", f"{ROOT}[{extra}]"], f"ctxguard-sdk[{extra}] in {path.name}", log)
        stamp.write_text(key, encoding="utf-8")
        half_made.unlink()
    return python


def cached(name: str) -> Path:
    """The packages of a requirements file, in an environment that is kept between clones and runs."""
    file = REQUIREMENTS / f"{name}.txt"
    text = _with_includes(file)
    key = _key(text)
    path = cache_root() / f"{name}-{key[:12]}"
    python = _python_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        stamp = path / ".ctxguard-whole"
        if _holds(stamp, key) and python.exists():
            return python
        log = path.with_name(f"{path.name}.log")
        _create(path, log)
        _install(python, ["--requirement", str(file)], name, log)
        for packages in BARE.findall(text):
            _install(python, ["--no-deps", *packages.split()], packages, log)
        for folder, packages in APART.findall(text):
            # --ignore-requires-python: the modules of agentlightning 1.0 that are wanted here run on 3.11
            options = ["--no-deps", "--ignore-requires-python", "--target", str(path / "apart" / folder)]
            _install(python, [*options, *packages.split()], f"{packages} apart", log)
        unwanted = [package for line in UNINSTALL.findall(text) for package in line.split()]
        if unwanted:
            _run([str(python), "-m", "pip", "uninstall", "--yes", *unwanted], log)
        stamp.write_text(key, encoding="utf-8")
    return python


def cache_root() -> Path:
    """Where big environments are kept: the user's cache, or the temporary folder of a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base) or base == "/.cache":
        base = os.path.join(tempfile.gettempdir(), f"cache-of-{os.getuid()}")
    return Path(base) / "ctxguard"


def _create(path: Path, log: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    log.write_text("", encoding="utf-8")
    if _run([sys.executable, "-m", "venv", str(path)], log) != 0:
        shutil.rmtree(path, ignore_errors=True)
        raise InstallError(
            f"{_tail(log)}\n{sys.executable} cannot make a virtualenv. On Debian and its kin install the "
            "package python3-venv, or name another Python: make PYTHON=/path/to/python3"
        )


def _install(python: Path, arguments: list[str], what: str, log: Path) -> None:
    print(f"installing {what} (log: {log})", file=sys.stderr, flush=True)
    start = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    for left in reversed(range(TRIES)):  # once more, for an index that did not answer
        if _run(command, log) == 0:
            print(f"installed in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            return
        if left:
            print("pip failed; trying once more", file=sys.stderr, flush=True)
    raise InstallError(f"{_tail(log)}\npip could not install {what}; all it said is in {log}")


def _run(command: list[str], log: Path) -> int:
    # What the caller's shell set for its own Python must not leak into another one.
    leaks = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
    environment = {name: value for name, value in os.environ.items() if name not in leaks}
    with log.open("ab") as out:
        out.write(f"$ {' '.join(command)}\n".encode())
        out.flush()
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, cwd=ROOT
        ).returncode


def _tail(log: Path, lines: int = 25) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return "\n".join(line if len(line) <= 300 else f"{line[:300]} …" for line in said)


def _with_includes(file: Path) -> str:
    """The text of a requirements file and of those that it includes."""
    text = file.read_text(encoding="utf-8")
    included = re.findall(r"^-r\s+(\S+)", text, re.MULTILINE)
    return text + "".join(_with_includes(file.parent / name) for name in included)


def _key(*parts: str) -> str:
    facts = [_version(), sys.implementation.name, sys.platform, os.uname().machine, sys.base_prefix, *parts]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _version_in(path: Path) -> str | None:
    """The Python version of the environment at path, None where there is none that works."""
    try:
        found = subprocess.run(
            [str(_python_of(path)), "-c", "import sys, pip; print('.'.join(map(str, sys.version_info[:3])))"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _python_of(path: Path) -> Path:
    return path / "bin" / "python"


def _holds(stamp: Path, key: str) -> bool:
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == key


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time makes an environment; a second one waits and finds it whole."""
    import fcntl

    with path.with_name(f"{path.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) == 3 and arguments[0] == "project":
            print(project(Path(arguments[1]).absolute(), arguments[2]))
        elif len(arguments) == 2 and arguments[0] == "cached":
            print(cached(arguments[1]))
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
