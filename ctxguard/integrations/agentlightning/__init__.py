"""Agent Lightning 0.x: the agent's side, in the runner's process.

    import agentlightning as agl
    from ctxguard import ContextBudget, Guard
    from ctxguard.integrations.agentlightning import (
        guarded_client, mark_failures, request_defaults, use_guard,
    )

    use_guard(Guard(ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)))

    @agl.rollout
    @mark_failures
    def agent(task, llm):
        client = guarded_client(llm)
        answer = client.chat.completions.create(**request_defaults(llm), messages=[…])
        return 1.0

Each rollout ends once: with a reward, or failed with a reason. How the failure reaches the trainer:

=============  ==========================  ===========================================================
version        carrier of the mark         what to do
=============  ==========================  ===========================================================
0.3, v1 mode   a span of the attempt       nothing more than `mark_failures`
0.3, v1 mode   and the attempt's metadata  ``agl.Trainer(hooks=[FailureMarkHook()], …)``; may be left out
0.3, v0 mode   the rollout's metadata      `mark_failures` on the ``LitAgent`` class; or, for methods and
                                           functions, ``trainer.fit_v0(agent, MarkingClient("http://…"))``
0.1.2          the rollout's metadata      ``trainer.fit(agent, MarkingClient("http://…"))``
=============  ==========================  ===========================================================

On top of that the function raises, so that the runner reports ``failed`` (v1) or posts no reward (v0).

Importing this package does not import Agent Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctxguard.integrations.agentlightning.client import (
    default_guard,
    guarded_async_client,
    guarded_client,
    request_defaults,
    use_guard,
)
from ctxguard.integrations.agentlightning.rollouts import mark_failures
from ctxguard.integrations.agentlightning.sent import record_sent

if TYPE_CHECKING:
    from ctxguard.integrations.agentlightning.hooks import FailureMarkHook
    from ctxguard.integrations.agentlightning.v0_client import MarkingClient

__all__ = [
    "FailureMarkHook",
    "MarkingClient",
    "default_guard",
    "guarded_async_client",
    "guarded_client",
    "mark_failures",
    "record_sent",
    "request_defaults",
    "use_guard",
]

# Subclasses of Agent Lightning's own classes: loaded when asked for.
_LOADED_LATER = {"FailureMarkHook": "hooks", "MarkingClient": "v0_client"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATER:
        return getattr(import_module(f"{__name__}.{_LOADED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
