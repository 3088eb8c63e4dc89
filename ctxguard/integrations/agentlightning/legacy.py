"""Agent Lightning 0.1.2: the same filter where the library names its own classes, and an entry point.

Instead of ``python -m agentlightning.verl …`` run, with the same settings,

    python -m ctxguard.integrations.agentlightning.legacy …

0.1.2 has no place to hand over a daemon or a trainer. `LegacyTrainer` puts the guarded daemon in the plain
one's place at the moment the trainer makes it, before it starts; the entry point runs 0.1.2's own task with
`LegacyTrainer`. Nothing of Agent Lightning's is changed for others.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import types
from collections.abc import Callable
from typing import Any

from agentlightning.verl.daemon import AgentModeDaemon
from agentlightning.verl.trainer import AgentLightningTrainer

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.agentlightning import advantages
from ctxguard.integrations.agentlightning.filter import FailedRolloutFilter
from ctxguard.integrations.agentlightning.steps import SkipsThinSteps

__all__ = ["PER_ROLLOUT", "LegacyDaemon", "LegacyTrainer", "main", "run_ppo"]

PER_ROLLOUT = advantages.ESTIMATOR
"""``"ctxguard_grpo_per_rollout"``, a value of ``algorithm.adv_estimator``: GRPO in which each rollout of a
group counts once. verl's own ``grpo`` counts each row."""


class LegacyDaemon(FailedRolloutFilter, AgentModeDaemon):  # type: ignore[misc]
    """0.1.2's ``AgentModeDaemon`` that accounts for each queued rollout once; see `FailedRolloutFilter`."""

    @classmethod
    def instead_of(cls, daemon: AgentModeDaemon) -> LegacyDaemon:
        """A guarded daemon with the settings of one that has not been started."""
        return cls(
            daemon.server_port,
            daemon.train_rollout_n,
            train_information=daemon.train_information,
            tokenizer=daemon.tokenizer,
            mini_batch_size=daemon.mini_batch_size,
            pad_token_id=daemon.pad_token_id,
            reward_fillna_value=daemon.reward_fillna_value,
            llm_timeout_seconds=daemon.llm_timeout_seconds,
        )


class LegacyTrainer(SkipsThinSteps, AgentLightningTrainer):  # type: ignore[misc]
    """0.1.2's trainer with `LegacyDaemon` (or ``daemon_cls`` of a subclass), and without thin steps."""

    daemon_cls: type[LegacyDaemon] = LegacyDaemon
    """The daemon; 0.1.2's ``fit`` makes a plain one, which this replaces."""

    @property
    def agent_mode_daemon(self) -> LegacyDaemon:
        """The daemon of this trainer."""
        return self._daemon

    @agent_mode_daemon.setter
    def agent_mode_daemon(self, daemon: AgentModeDaemon) -> None:
        is_guarded = isinstance(daemon, FailedRolloutFilter)
        self._daemon = daemon if is_guarded else self.daemon_cls.instead_of(daemon)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same code where some global names mean something else; the original is left as it is."""
    changed = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def task_runner(trainer_cls: type[LegacyTrainer] = LegacyTrainer) -> Any:
    """0.1.2's ``TaskRunner`` (a Ray actor class) that trains with another trainer class.

    Raises:
        ConfigurationError: the installed Agent Lightning is not 0.1.2; newer ones take ``trainer_cls`` and
            ``daemon_cls`` themselves.
    """
    import ray
    from agentlightning.verl import entrypoint

    if not hasattr(entrypoint, "AgentLightningTrainer"):
        raise ConfigurationError(
            f"agentlightning {importlib.metadata.version('agentlightning')} is not 0.1.2: give "
            "agl.VERL(config, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer) instead, from "
            "ctxguard.integrations.agentlightning.verl"
        )
    plain = entrypoint.TaskRunner.__ray_metadata__.modified_class
    run = with_names(inspect.unwrap(plain.run), AgentLightningTrainer=trainer_cls)  # Ray wraps methods
    return ray.remote(num_cpus=1)(type("TaskRunner", (plain,), {"run": run}))


def run_ppo(config: Any, trainer_cls: type[LegacyTrainer] = LegacyTrainer) -> None:
    """0.1.2's ``run_ppo`` with a guarded trainer.

    Args:
        config: the composed configuration, as ``agentlightning.verl`` takes it.
        trainer_cls: `LegacyTrainer` or a subclass.

    Raises:
        ConfigurationError: the installed Agent Lightning is not 0.1.2.
    """
    from agentlightning.verl import entrypoint

    with_names(entrypoint.run_ppo, TaskRunner=task_runner(trainer_cls))(config)


def main() -> None:
    """The entry point: Hydra reads 0.1.2's own configuration and the command line."""
    import hydra

    hydra.main(config_path="pkg://agentlightning/verl", config_name="config", version_base=None)(run_ppo)()


if __name__ == "__main__":
    main()
