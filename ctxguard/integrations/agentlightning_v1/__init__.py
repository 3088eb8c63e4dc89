"""Agent Lightning 1.0: explicit failed rollouts, from the agent's process to the trainer.

The agent's side is importable from here and needs no Agent Lightning in the agent's image::

    from ctxguard.integrations.agentlightning_v1 import guarded_client, guarded_run

    class Agent:
        @guarded_run
        def run(self):
            client = guarded_client()
            ...
            return reward

The trainer's side is in two strengths, each a module of its own, since both import Agent Lightning:

* `ctxguard.integrations.agentlightning_v1.hooks`: a hooks file for an unchanged trainer.
* `ctxguard.integrations.agentlightning_v1.entrypoint`: ``run_ppo`` with `GuardedTrainer`, which accounts
  for every rollout; ``python -m ctxguard.integrations.agentlightning_v1`` starts it from the command line.
"""

from ctxguard.integrations.agentlightning_v1.agent import guarded_client, guarded_run
from ctxguard.integrations.agentlightning_v1.gateway import Gateway

__all__ = ["Gateway", "guarded_client", "guarded_run"]
