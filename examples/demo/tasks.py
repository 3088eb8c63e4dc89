"""What each rollout is asked, and the script that stands in for the model's choices."""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from examples.demo.forms import Form
from examples.demo.tools import SourceTree, ToolCall

PACKAGES = ("asyncio", "email", "logging", "xml", "importlib", "urllib", "unittest", "http")
FORMS: tuple[Form, ...] = ("native", "text", "parallel", "reminder", "native", "native", "native", "native")
READS = (220, 200, 110, 240, 200, 220, 230, 240)
"""Lines that the agents read at a time, in a window of 20480 tokens."""

WHOLE_FILE = 4
"""This agent begins by reading a whole file: one tool result that is longer than the window."""

CHARACTERS_PER_TOKEN = 4.5
"""Of Python source in Qwen3's vocabulary, about."""

Script = Generator[Sequence[ToolCall], Sequence[str], float]
"""Yields the next tool calls, is sent their results, and returns the reward."""


@dataclass(frozen=True)
class Task:
    """One rollout's task.

    Attributes:
        name: names the rollout.
        form: how tool calls and results are written into its history.
        package: where the agent is to look.
        names: what it is to find.
        read_lines: lines that it reads around each place.
        first_file: a file that it reads as a whole before anything else.
        paste: text that comes with the task.
    """

    name: str
    form: Form
    package: str
    names: tuple[str, ...] = ()
    read_lines: int = 100
    first_file: str | None = None
    paste: str = ""

    @property
    def fits(self) -> bool:
        """Whether the task itself leaves room for work in the window."""
        return not self.paste

    @property
    def question(self) -> str:
        """The first user message."""
        if self.paste:
            return f"Which of these functions of {self.package} is the longest?\n\n{self.paste}"
        names = ", ".join(self.names)
        return f"Find where each of these is defined in the package {self.package}, and read it: {names}."

    @property
    def at_once(self) -> int:
        """How many tool calls the agent makes in one message."""
        return 3 if self.form == "parallel" else 1

    @property
    def expected_calls(self) -> int:
        """Calls of the model that the script comes to, for the progress bar."""
        batches = -(-len(self.names) // self.at_once)
        return 2 * batches + 2 + (self.first_file is not None)

    def script(self) -> Script:
        """List the files, then search each name and read around its definition.

        Returns the share of the names whose definition stood in what was read.
        """
        found = 0
        yield [ToolCall("list_files", {"folder": self.package})]
        if self.first_file is not None:
            yield [ToolCall("read_file", {"path": self.first_file})]
        for start in range(0, len(self.names), self.at_once):
            names = self.names[start : start + self.at_once]
            hits = yield [ToolCall("search", {"text": name, "folder": self.package}) for name in names]
            places = [_definition(name, text) for name, text in zip(names, hits, strict=True)]
            reads = [self._read(*place) for place in places if place is not None]
            texts = (yield reads) if reads else []
            found += sum(any(_defines(name, text) for text in texts) for name in names)
        return found / len(self.names) if self.names else 0.0

    def _read(self, path: str, line: int) -> ToolCall:
        first = max(1, line - self.read_lines // 2)
        return ToolCall("read_file", {"path": path, "first_line": first, "lines": self.read_lines})


def make_tasks(tree: SourceTree, *, rollouts: int, window: int, seed: int) -> list[Task]:
    """The tasks of a run: the same for the same seed and Python, the last one too long for the window.

    Args:
        tree: where the agents look.
        rollouts: tasks that can be carried through.
        window: the server's window in tokens; the agents read more at a time in a larger one.
        seed: decides which names.
    """
    chance = random.Random(seed)
    tasks = []
    for index in range(rollouts):
        package, form = PACKAGES[index % len(PACKAGES)], FORMS[index % len(FORMS)]
        defined = _defined_names(tree, package)
        wanted = 18 if form == "parallel" else 12
        whole = tree.paths(package) if index % len(FORMS) == WHOLE_FILE else []
        tasks.append(
            Task(
                name=f"{index + 1} {package}",
                form=form,
                package=package,
                names=tuple(chance.sample(defined, min(wanted, len(defined)))),
                read_lines=max(20, READS[index % len(READS)] * window // 20480),
                first_file=max(whole, key=lambda path: len(tree.lines(path)), default=None),
            )
        )
    return [*tasks, _too_long(tree, rollouts + 1, window)]


def _too_long(tree: SourceTree, number: int, window: int) -> Task:
    """A task with half as much again as the window pasted into it."""
    text = "\n".join("\n".join(tree.lines(path)) for path in tree.paths("asyncio"))
    pasted = text[: int(1.5 * window * CHARACTERS_PER_TOKEN)]
    return Task(name=f"{number} pasted file", form="native", package="asyncio", paste=pasted)


def _defined_names(tree: SourceTree, package: str) -> list[str]:
    lines = (line for path in tree.paths(package) for line in tree.lines(path))
    matches = (re.match(r"(?:class|def|async def) (\w{6,})", line) for line in lines)
    return sorted({match[1] for match in matches if match})


def _defines(name: str, text: str) -> bool:
    return re.search(rf"\b(class|def) {name}\b", text) is not None


def _definition(name: str, hits: str) -> tuple[str, int] | None:
    """Path and line of the definition among search hits."""
    match = re.search(rf"^(\S+):(\d+): (?:class|def|async def) {name}\b", hits, re.MULTILINE)
    return (match[1], int(match[2])) if match else None
