"""Progress while it runs, and the tables at the end. Plain lines where nobody watches a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from examples.demo.rollouts import Row
from examples.demo.tasks import Task
from examples.demo.verdict import Verdict

WIDTH = 110
"""Of a table that goes into a file or a log."""

NUMBERS = ("calls", "refused", "compac-\ntions", "history\ntokens", "largest\nprompt", "predicted\n- served")


class Screen:
    """Where the demo writes to. Watches the rollouts of a phase (see `Watcher`)."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=WIDTH)
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def say(self, text: str, style: str | None = None) -> None:
        """Write a line or two."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, tasks: Sequence[Task]) -> Iterator[None]:
        """Show the progress of a phase, one bar for each rollout."""
        self.say(f"\n{title}", style="bold")
        if not self.console.is_interactive:
            yield
            return
        columns = (
            TextColumn("{task.description:18}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console, transient=True) as self._progress:
            self._bars = {
                task.name: self._progress.add_task(task.name, total=task.expected_calls, note="")
                for task in tasks
            }
            try:
                yield
            finally:
                self._progress, self._bars = None, {}

    def step(self, task: str, prompt_tokens: int) -> None:
        """An agent got an answer."""
        if self._progress is not None:
            self._progress.update(self._bars[task], advance=1, note=f"{prompt_tokens:,} tokens")

    def end(self, row: Row) -> None:
        """A rollout has ended."""
        if self._progress is not None:
            self._progress.update(self._bars[row.task], note=row.outcome)
        else:
            self.say(f"  {row.task}: {row.outcome}")

    def table(self, rows: Sequence[Row]) -> None:
        """What became of the rollouts of a phase."""
        is_wide = self.console.width >= 100
        table = Table(box=SIMPLE_HEAD, padding=(0, 1 if is_wide else 0, 0, 0))
        table.add_column("rollout", no_wrap=True)
        if is_wide:
            table.add_column("tools", no_wrap=True)
        for heading in NUMBERS:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("outcome", overflow="fold")
        for row in rows:
            style = {"succeeded": "green", "failed": "yellow"}.get(row.status, "red")
            difference = max(map(abs, row.differences), default=None)
            table.add_row(
                row.task,
                *([row.form] if is_wide else []),
                str(row.calls),
                str(row.refusals),
                str(row.compactions),
                f"{row.history_tokens:,}",
                f"{row.peak_prompt_tokens:,}" if row.peak_prompt_tokens else "-",
                "-" if difference is None else str(difference),
                Text(row.outcome, style),
            )
        self.console.print(table)

    def verdict(self, verdict: Verdict, seconds: float) -> None:
        """The last lines."""
        for line in verdict.lines:
            self.say(line, style="bold")
        for problem in verdict.problems:
            self.say(f"PROBLEM: {problem}", style="bold red")
        self.say(f"{seconds:.0f} seconds")
