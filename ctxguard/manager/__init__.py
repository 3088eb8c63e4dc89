"""The manager: walks the strategies from cheap to costly until the target holds.

In: the caller's whole history, tools and budget. Out: a `Fit`, the messages to send and a report.
"""

from ctxguard.manager.manager import Ask, HistoryManager, Mode, run_offline
from ctxguard.manager.pins import Pins
from ctxguard.manager.points import call_points
from ctxguard.manager.report import Fit, FitReport, Limits, StrategyStep

__all__ = [
    "Ask",
    "Fit",
    "FitReport",
    "HistoryManager",
    "Limits",
    "Mode",
    "Pins",
    "StrategyStep",
    "call_points",
    "run_offline",
]
