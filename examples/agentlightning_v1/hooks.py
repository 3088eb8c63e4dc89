"""The hooks file for the trainer of Agent Lightning 1.0: ``agentlightning.hooks=…/hooks.py``.

Its loader takes a file in which exactly one subclass of ``RolloutHooks`` is visible, imported ones included.
So there are two forms. Without settings, one import is the whole file::

    from ctxguard.integrations.agentlightning_v1.hooks import FailedRolloutHooks

With settings, or with hooks of your own, subclass it through the module, as below: an imported
``FailedRolloutHooks`` would be a second visible class, and the loader refuses two.

In both, ``AGL_BASE_URL`` and ``AGL_KEY`` in the trainer's environment say where Agent Lightning's server is.
"""

from ctxguard import ContextBudget
from ctxguard.integrations.agentlightning_v1 import hooks


class LogReaderHooks(hooks.FailedRolloutHooks):
    # The trainer's own lengths (train.sh): for the agents, and for what failed rollouts leave behind.
    budget = ContextBudget(
        window=20480, max_prompt_tokens=12288, max_response_tokens=8192, level="trajectory"
    )
    max_prompt_length = 12288
