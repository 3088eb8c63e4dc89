"""Pre-commit hook: ends each file with exactly one newline and takes trailing blanks off its lines.

Says which files it changed, and then fails, so that the change is looked at and staged.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def tidied(data: bytes) -> bytes:
    """The content as it should be; an empty file stays empty."""
    data = re.sub(rb"[ \t]+(?=\r?\n|\Z)", b"", data).rstrip(b"\r\n")
    return data + b"\n" if data else b""


def main(files: list[str]) -> int:
    changed = 0
    for name in files:
        file = Path(name)
        before = file.read_bytes()
        after = tidied(before)
        if after != before:
            file.write_bytes(after)
            print(f"tidied {name}")
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
