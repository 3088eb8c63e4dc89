"""ctxguard: token budgets for tool agents, enforced before every call.

Wrap the client (`wrap_openai`, `Guard`), decorate the rollout (`guarded_rollout`), or fit a history by
hand (`HistoryManager`). Everything a user needs is importable from here; modules whose names do not
appear in ``__all__`` may change.
"""

from ctxguard._version import __version__
from ctxguard.budget import ContextBudget
from ctxguard.client.guard import Guard, wrap_openai
from ctxguard.compaction import (
    CapToolResults,
    ClearToolResults,
    CompactionStrategy,
    DropOldestTurns,
    DropOldReasoning,
    SummarizeOldTurns,
    TruncateMessages,
    default_strategies,
)
from ctxguard.errors import (
    BudgetError,
    ConfigurationError,
    ContextOverflowError,
    CounterError,
    CtxguardError,
    InvalidMessagesError,
    ServerUnavailableError,
    StrategyError,
    TemplateRefusedError,
    UnsupportedClientError,
    WindowUnknownError,
)
from ctxguard.manager import Fit, FitReport, HistoryManager
from ctxguard.messages import Turn
from ctxguard.outcome import Failure, FailureReason, RolloutOutcome, guarded_rollout
from ctxguard.scope import RolloutScope, current_scope
from ctxguard.tokens import (
    ApproximateCounter,
    ChatTemplateCounter,
    TiktokenCounter,
    TokenCounter,
    counter_for,
)

__distribution__ = "ctxguard-sdk"
"""Name on the package index. Another project there is called ctxguard; this tells which one is imported."""

__all__ = [
    "ApproximateCounter",
    "BudgetError",
    "CapToolResults",
    "ChatTemplateCounter",
    "ClearToolResults",
    "CompactionStrategy",
    "ConfigurationError",
    "ContextBudget",
    "ContextOverflowError",
    "CounterError",
    "CtxguardError",
    "DropOldReasoning",
    "DropOldestTurns",
    "Failure",
    "FailureReason",
    "Fit",
    "FitReport",
    "Guard",
    "HistoryManager",
    "InvalidMessagesError",
    "RolloutOutcome",
    "RolloutScope",
    "ServerUnavailableError",
    "StrategyError",
    "SummarizeOldTurns",
    "TemplateRefusedError",
    "TiktokenCounter",
    "TokenCounter",
    "TruncateMessages",
    "Turn",
    "UnsupportedClientError",
    "WindowUnknownError",
    "__distribution__",
    "__version__",
    "counter_for",
    "current_scope",
    "default_strategies",
    "guarded_rollout",
    "wrap_openai",
]
