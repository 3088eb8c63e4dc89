"""Starting a run of Agent Lightning 1.0 with `GuardedTrainer`, in place of its own ``run_ppo``.

    from ctxguard.integrations.agentlightning_v1.entrypoint import run_ppo

    run_ppo(config, train_dataset=train, val_dataset=val)

1.0.2's own task runner names its trainer class inside its ``run``, so that this module has one of its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pprint import pformat
from typing import Any

import ray
from agentlightning.verl.dataset import LoadedDataset
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunner, get_ppo_ray_runtime_env

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.agentlightning_v1.trainer import GuardedTrainer

logger = logging.getLogger("ctxguard")

SETUP_HOOK = "agentlightning.verl.per_rollout_loss.register_in_worker"
"""Registers Agent Lightning's policy losses in each Ray worker; as in its own ``run_ppo``."""


def run_ppo(
    config: Any,
    train_dataset: Sequence[Any],
    val_dataset: Sequence[Any],
    *,
    trainer_class: type[GuardedTrainer] = GuardedTrainer,
) -> None:
    """Train, with the configuration and the arguments of ``agentlightning.verl.entrypoint.run_ppo``.

    Args:
        config: Agent Lightning's configuration; its section ``ctxguard``, if any, is `GuardSettings`.
        train_dataset, val_dataset: tasks, as JSON-serialisable mappings.
        trainer_class: a subclass of `GuardedTrainer` of your own, importable by name.

    Raises:
        ConfigurationError: a data set is empty.
    """
    for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
        if not len(dataset):
            raise ConfigurationError(f"{name} is empty: give at least one task")
    if not ray.is_initialized():
        ray.init(**_ray_options(config))
    runner = ray.remote(num_cpus=1)(GuardedTaskRunner).remote()
    ray.get(
        runner.run.remote(config, LoadedDataset(train_dataset), LoadedDataset(val_dataset), trainer_class)
    )


def _ray_options(config: Any) -> dict[str, Any]:
    given: Any = OmegaConf.to_container(config.ray_kwargs.get("ray_init", OmegaConf.create({})), resolve=True)
    options: dict[str, Any] = {str(name): value for name, value in (given or {}).items()}
    runtime = {**get_ppo_ray_runtime_env(), **(options.pop("runtime_env", None) or {})}
    runtime.setdefault("worker_process_setup_hook", SETUP_HOOK)
    folder = os.environ.get("RAY_TMPDIR")
    return {"runtime_env": runtime, **({"_temp_dir": folder} if folder else {}), **options}


class GuardedTaskRunner(TaskRunner):  # type: ignore[misc]
    """verl's ``TaskRunner`` with Agent Lightning's data sets and our trainer; runs as a Ray actor."""

    def run(
        self,
        config: Any,
        train_dataset: Any,
        val_dataset: Any,
        trainer_class: type[GuardedTrainer] = GuardedTrainer,
    ) -> None:
        """Set up the workers as verl does, make the trainer and run it to the end."""
        from verl.trainer.main_ppo import create_rl_sampler
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
        from verl.utils.dataset.rl_dataset import collate_fn
        from verl.utils.fs import copy_to_local
        from verl.utils.tokenizer import hf_tokenizer

        OmegaConf.resolve(config)
        logger.info("configuration: %s", pformat(OmegaConf.to_container(config)))
        actor_rollout_cls, ray_worker_group_cls = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_resource_pool(config)
        self.add_ref_policy_worker(config, actor_rollout_cls)
        validate_config(
            config=config,
            use_reference_policy=need_reference_policy(config),
            use_critic=need_critic(config),
        )
        model = config.actor_rollout_ref.model
        local_path = copy_to_local(model.path, use_shm=model.get("use_shm", False))
        trust_remote_code = config.data.get("trust_remote_code", False)
        trainer = trainer_class(
            config=config,
            tokenizer=hf_tokenizer(local_path, trust_remote_code=trust_remote_code),
            processor=_processor(local_path, trust_remote_code),
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            ray_worker_group_cls=ray_worker_group_cls,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(config.data, train_dataset),
        )
        trainer.init_workers()
        trainer.fit()


def _processor(local_path: str, trust_remote_code: bool) -> Any:
    """The model's processor; None for a model of text only.

    verl knows some classes only and gives None for the others; Agent Lightning then asks transformers.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase
    from verl.utils.tokenizer import hf_processor

    processor = hf_processor(local_path, trust_remote_code=trust_remote_code, use_fast=True)
    if processor is not None:
        return processor
    try:
        found = AutoProcessor.from_pretrained(local_path, trust_remote_code=trust_remote_code, use_fast=True)
    except Exception as error:  # transformers raises many kinds for a model that has no processor
        logger.warning("no processor for %s, so no images in training: %s", local_path, error)
        return None
    is_tokenizer = isinstance(found, PreTrainedTokenizerBase) or "Processor" not in type(found).__name__
    return None if is_tokenizer else found
