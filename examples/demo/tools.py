"""The agent's tools. They really list, read and search the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MAX_HITS = 60


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and the arguments that it is called with."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class SourceTree:
    """Python files under one folder; paths are relative to it."""

    root: Path

    @classmethod
    def of_standard_library(cls) -> SourceTree:
        """The sources of the Python that runs this."""
        return cls(Path(sysconfig.get_paths()["stdlib"]))

    def run(self, call: ToolCall) -> str:
        """What the tool answers. A mistake in the call is an answer too: an agent should read it."""
        tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "read_file": self.read_file,
            "search": self.search,
        }
        if call.name not in tools:
            return f"error: there is no tool {call.name}"
        try:
            return tools[call.name](**call.arguments)
        except (OSError, TypeError, ValueError) as error:
            return f"error: {error}"

    def list_files(self, folder: str) -> str:
        """Every file of a folder, with its number of lines."""
        return "\n".join(f"{path}: {len(self.lines(path))} lines" for path in self.paths(folder))

    def read_file(self, path: str, first_line: int = 1, lines: int = 1_000_000) -> str:
        """Lines of a file, numbered."""
        start = max(first_line, 1) - 1
        shown = self.lines(path)[start : start + lines]
        return "\n".join(f"{number:5} {line}" for number, line in enumerate(shown, start + 1))

    def search(self, text: str, folder: str) -> str:
        """Lines that contain a text, as ``path:line: text``."""
        hits = [
            f"{path}:{number}: {line.strip()}"
            for path in self.paths(folder)
            for number, line in enumerate(self.lines(path), 1)
            if text in line
        ]
        more = [f"... and {len(hits) - MAX_HITS} more"] if len(hits) > MAX_HITS else []
        return "\n".join(hits[:MAX_HITS] + more) or "nothing found"

    def paths(self, folder: str) -> list[str]:
        """The Python files of a folder, tests left out."""
        inside = self._inside(folder).rglob("*.py")
        found = sorted(path.relative_to(self.root).as_posix() for path in inside)
        return [path for path in found if "/test" not in path]

    def lines(self, path: str) -> list[str]:
        """The lines of a file."""
        return _lines(self._inside(path))

    def _inside(self, path: str) -> Path:
        full = (self.root / path).resolve()
        if not full.is_relative_to(self.root.resolve()):
            raise ValueError(f"{path} is not in the source tree")
        return full


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _schema(name: str, description: str, required: list[str], **properties: dict[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_PATH = {"type": "string", "description": "Path relative to the root of the source tree."}
_NUMBER = {"type": "integer", "description": "Counted from 1."}

TOOLS: list[dict[str, Any]] = [
    _schema("list_files", "List the Python files of a folder.", ["folder"], folder=_PATH),
    _schema(
        "read_file",
        "Read a file, or a part of it.",
        ["path"],
        path=_PATH,
        first_line=_NUMBER,
        lines={"type": "integer", "description": "How many lines to read; all when left out."},
    ),
    _schema(
        "search",
        "Find the lines of a folder's files that contain a text.",
        ["text", "folder"],
        text={"type": "string", "description": "Text to look for; not a pattern."},
        folder=_PATH,
    ),
]
