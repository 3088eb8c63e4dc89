"""DECIDE: strategies that make a history smaller, from cheap to costly.

In: turns and the number of tokens to free. Out: turns. The manager calls them in the order of the
list, recounts after each, and stops as soon as the target holds.
"""

from ctxguard.compaction.base import CLEARED, CUT, CompactionContext, CompactionStrategy
from ctxguard.compaction.drop import DropOldestTurns
from ctxguard.compaction.reasoning import DropOldReasoning
from ctxguard.compaction.summarize import SummarizeOldTurns
from ctxguard.compaction.tool_results import CapToolResults, ClearToolResults
from ctxguard.compaction.truncate import TruncateMessages

__all__ = [
    "CLEARED",
    "CUT",
    "CapToolResults",
    "ClearToolResults",
    "CompactionContext",
    "CompactionStrategy",
    "DropOldReasoning",
    "DropOldestTurns",
    "SummarizeOldTurns",
    "TruncateMessages",
    "default_strategies",
]


def default_strategies() -> list[CompactionStrategy]:
    """The default list. It needs no model, and gives up only where system + task + tools + newest turn do.

    Old reasoning goes first, then single messages that alone take more than half of the prompt, then
    old tool results, then the oldest turns; what is still too long is cut, the newest turn included.
    """
    return [
        DropOldReasoning(),
        TruncateMessages(keep_share=0.5),
        ClearToolResults(),
        DropOldestTurns(),
        TruncateMessages(keep_tokens=64, target="high"),
    ]
