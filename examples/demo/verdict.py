"""What must hold at the end of the demo, and its figures in short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from examples.demo.rollouts import Row


@dataclass(frozen=True)
class Verdict:
    """Both phases, looked at together.

    Attributes:
        window: the server's window in tokens.
        unguarded, guarded: the rows of the two phases.
    """

    window: int
    unguarded: Sequence[Row]
    guarded: Sequence[Row]

    @property
    def problems(self) -> list[str]:
        """What should not have happened; the demo's exit status is 0 only where this is empty."""
        problems = []
        for row in self.guarded:
            wrong = [difference for difference in row.differences if difference]
            if wrong:
                problems.append(
                    f"{row.task}: predicted and served differ on {len(wrong)} calls, e.g. by {wrong[0]}"
                )
            if row.status == "no result":
                problems.append(f"{row.task}: the guarded rollout has no outcome")
            elif row.fits and row.status != "succeeded":
                problems.append(f"{row.task}: {row.outcome}")
            elif not row.fits and (row.status, row.reason) != ("failed", "context_overflow"):
                problems.append(f"{row.task}: cannot fit, but ended as: {row.outcome}")
            if row.fits and len(row.differences) != row.calls:
                problems.append(f"{row.task}: {row.calls} calls, but {len(row.differences)} answers")
        return problems

    @property
    def lines(self) -> list[str]:
        """The result in a few lines."""
        refused = [row.peak_prompt_tokens for row in self.unguarded if row.reason == "refused"]
        sizes = f"; the server refused prompts of {_range(refused)} tokens" if refused else ""
        failed = "".join(f"; {row.task} {row.outcome}" for row in self.guarded if row.status == "failed")
        histories = [row.history_tokens for row in self.guarded if row.fits]
        largest = max((row.peak_prompt_tokens for row in self.guarded), default=0)
        return [
            f"unguarded: {_finished(self.unguarded)} finished{sizes}",
            f"guarded: {_finished(self.guarded)} finished{failed}",
            f"guarded: histories of {_range(histories)} tokens, sent as prompts of at most {largest:,}; "
            f"{sum(row.refusals for row in self.guarded)} refused",
            f"predicted = served on {_equal(self.guarded)} guarded calls, {_equal(self.unguarded)} unguarded",
        ]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "window": self.window,
            "unguarded": [asdict(row) for row in self.unguarded],
            "guarded": [asdict(row) for row in self.guarded],
            "summary": self.lines,
            "problems": self.problems,
        }


def _finished(rows: Sequence[Row]) -> str:
    return f"{sum(row.status == 'succeeded' for row in rows)}/{len(rows)}"


def _equal(rows: Sequence[Row]) -> str:
    differences = [difference for row in rows for difference in row.differences]
    return f"{differences.count(0)}/{len(differences)}"


def _range(values: Sequence[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
