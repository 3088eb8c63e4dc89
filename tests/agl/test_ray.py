"""The classes are found by name in a Ray worker, where Agent Lightning makes the daemon and the trainer."""

from __future__ import annotations

import pytest
import ray

from ctxguard.integrations.agentlightning import verl as ours


class OwnDaemon(ours.GuardedDaemon):
    """A user's own settings."""

    failure_handling = "penalize(-1)"


@pytest.fixture(scope="module")
def local_ray():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=1)
class Worker:
    """Does with the classes what 0.3.0's TaskRunner does."""

    def make(self, daemon_cls, trainer_cls):
        from agentlightning.verl.daemon import AgentModeDaemon, _find_available_port
        from agentlightning.verl.trainer import AgentLightningTrainer
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn

        from ctxguard.integrations.agentlightning.advantages import ESTIMATOR

        daemon = daemon_cls(
            _find_available_port(),
            2,
            train_information={"model": "m"},
            tokenizer=None,
            mini_batch_size=2,
            pad_token_id=0,
            mode="v0",
        )
        return {
            "daemon": (daemon_cls.__module__, isinstance(daemon, AgentModeDaemon), daemon.failure_handling),
            "trainer": (trainer_cls.__module__, issubclass(trainer_cls, AgentLightningTrainer)),
            "estimator": get_adv_estimator_fn(ESTIMATOR).__module__,
        }


@pytest.mark.parametrize(
    ("daemon_cls", "handling"),
    [(ours.GuardedDaemon, "exclude"), (OwnDaemon, "penalize(-1)")],
    ids=["ours", "own"],
)
def test_a_worker_makes_them(local_ray, daemon_cls, handling):
    made = ray.get(Worker.remote().make.remote(daemon_cls, ours.GuardedTrainer), timeout=120)
    assert made == {
        "daemon": (daemon_cls.__module__, True, handling),
        "trainer": (ours.__name__, True),
        "estimator": "ctxguard.integrations.agentlightning.advantages",
    }


def test_verl_takes_them():
    import agentlightning as agl

    algorithm = agl.VERL({}, daemon_cls=ours.GuardedDaemon, trainer_cls=ours.GuardedTrainer)
    assert (algorithm.daemon_cls, algorithm.trainer_cls) == (ours.GuardedDaemon, ours.GuardedTrainer)
