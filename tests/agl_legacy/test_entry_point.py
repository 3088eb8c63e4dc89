"""0.1.2's own task, run with our trainer and daemon; up to where a GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray
from agentlightning.verl import daemon, entrypoint, trainer

from ctxguard.integrations.agentlightning.legacy import LegacyDaemon, LegacyTrainer, run_ppo, with_names
from ctxguard.testing.tiny_model import cache_folder, write_hf_model

PORT = 9999


def test_a_trainer_has_our_daemon_with_the_settings_of_the_one_it_made():
    made = object.__new__(LegacyTrainer)
    made.agent_mode_daemon = daemon.AgentModeDaemon(
        PORT,
        8,
        train_information={"model": "m", "temperature": 0.7},
        tokenizer="t",
        mini_batch_size=16,
        pad_token_id=5,
    )
    ours = made.agent_mode_daemon
    assert type(ours) is LegacyDaemon
    assert (ours.server_port, ours.train_rollout_n, ours.mini_batch_size, ours.pad_token_id) == (
        PORT,
        8,
        16,
        5,
    )
    assert (ours.train_information["temperature"], ours.tokenizer, ours.llm_timeout_seconds) == (
        0.7,
        "t",
        600.0,
    )
    made.agent_mode_daemon = ours
    assert made.agent_mode_daemon is ours


def test_fit_runs_our_daemon():
    """`fit` itself, cut short where it starts the daemon."""

    class Stopped(Exception):
        pass

    class OwnDaemon(LegacyDaemon):
        def start(self):
            raise Stopped

    class OwnTrainer(LegacyTrainer):
        daemon_cls = OwnDaemon

        def _load_checkpoint(self):
            pass

    from omegaconf import OmegaConf

    made = object.__new__(OwnTrainer)
    made.config = OmegaConf.create(
        {
            "trainer": {"project_name": "p", "experiment_name": "e", "logger": []},
            "agentlightning": {"port": PORT},
            "actor_rollout_ref": {
                "rollout": {"n": 4, "temperature": 1.0},
                "model": {"path": "m"},
                "actor": {"ppo_mini_batch_size": 2},
            },
        }
    )
    made.async_rollout_mode = True
    made.tokenizer = type("Tokenizer", (), {"pad_token_id": 0})()
    with pytest.raises(Stopped):
        made.fit()
    assert isinstance(made.agent_mode_daemon, OwnDaemon)


class Reached(Exception):
    """The task made its trainer."""


class TellingTrainer(LegacyTrainer):
    def __init__(self, config, tokenizer, train_dataset, **parts):
        raise Reached(f"{type(self).__name__} {len(tokenizer)} {len(train_dataset)} {sorted(parts)[0]}")


def test_the_task_makes_our_trainer_in_a_ray_worker(tmp_path):
    import hydra
    import pandas as pd

    model = write_hf_model(cache_folder().with_name("tiny-qwen3-hf-2048"), 2048)
    data = tmp_path / "tasks.parquet"
    pd.DataFrame([{"question": "?", "answer": str(n)} for n in range(4)]).to_parquet(data)
    with hydra.initialize_config_module("agentlightning.verl", version_base=None):
        config = hydra.compose(
            "config",
            [
                f"actor_rollout_ref.model.path={model}", f"data.train_files={data}", f"data.val_files={data}",
                "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.mode=async",
                "data.train_batch_size=2", "trainer.n_gpus_per_node=1", "reward_model.enable=False",
            ],
        )  # fmt: skip
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(Reached, match=r"TellingTrainer 151669 4 collate_fn"):
            run_ppo(config, TellingTrainer)
    finally:
        ray.shutdown()


def test_nothing_of_theirs_is_changed():
    assert entrypoint.AgentLightningTrainer is trainer.AgentLightningTrainer
    changed = with_names(entrypoint.run_ppo, TaskRunner="ours")
    assert (changed.__globals__["TaskRunner"], changed.__code__) == ("ours", entrypoint.run_ppo.__code__)
    assert entrypoint.TaskRunner != "ours"


def test_the_module_reads_0_1_2s_configuration():
    done = subprocess.run(
        [sys.executable, "-m", "ctxguard.integrations.agentlightning.legacy", "data.max_prompt_length=12288",
         "--cfg", "job", "--resolve", "--package", "data"],
        env={**os.environ, "HYDRA_FULL_ERROR": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "max_prompt_length: 12288" in done.stdout
