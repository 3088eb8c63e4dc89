"""Prints the path of a Python of a given version, for what only runs on that one.

    python scripts/find_python.py 3.12

Looks on PATH, then at what pyenv and uv have installed. Exits with 1, and says what to do, where there is
none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CHECK = "import sys, venv, ensurepip; print('.'.join(map(str, sys.version_info[:2])), sys.executable)"


def candidates(version: str) -> Iterator[Path]:
    for folder in map(Path, os.get_exec_path()):
        yield folder / f"python{version}"
        if folder.name == "shims":  # pyenv's: they only run the versions that are switched on
            yield from (folder.parent / "versions").glob(f"{version}.*/bin/python{version}")
    home = Path(os.environ.get("HOME", "/nonexistent"))
    yield from (home / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")
    yield from (home / ".local" / "share" / "uv" / "python").glob(f"cpython-{version}.*/bin/python{version}")


def find(version: str) -> Path | None:
    for path in candidates(version):
        if not os.access(path, os.X_OK):
            continue
        asked = subprocess.run(
            [str(path), "-c", CHECK], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        answer = asked.stdout.split()
        if asked.returncode == 0 and answer[0] == version:
            return Path(answer[1])
    return None


def main(version: str) -> int:
    path = find(version)
    if path is None:
        print(
            f"No Python {version} with venv found (on PATH, in pyenv, in uv). Install one: "
            f"`uv python install {version}`, `pyenv install {version}`, or the package python{version}-venv.",
            file=sys.stderr,
        )
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
