"""The shipped entry point: configuration, tasks, and the task runner up to the trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from agentlightning.verl.entrypoint import _AglTaskRunner

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.agentlightning_v1 import entrypoint
from ctxguard.integrations.agentlightning_v1.__main__ import main, read_config, read_tasks
from ctxguard.integrations.agentlightning_v1.trainer import GuardedTrainer
from ctxguard.testing.tiny_model import cache_folder, write_tokenizer


def test_the_configuration_is_agent_lightnings_with_changes() -> None:
    config = read_config(["data.train_batch_size=3", "ctxguard.failure_handling=penalize(-1)"])
    assert config.algorithm.enable_rollout_level_advantage is True, "agentlightning/verl/config.yaml"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "per_rollout_mean"
    assert config.data.train_batch_size == 3
    assert config.ctxguard.failure_handling == "penalize(-1)"
    with pytest.raises(ConfigurationError, match="'train_batch_size' is no KEY=VALUE"):
        read_config(["train_batch_size"])


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_tasks_are_read_as_they_are(tmp_path: Path, suffix: str) -> None:
    tasks = [{"question": "1 + 1", "answer": 2}, {"question": "2 + 2", "answer": 4}]
    file = tmp_path / f"tasks.{suffix}"
    if suffix == "parquet":
        from datasets import Dataset

        Dataset.from_list(tasks).to_parquet(str(file))
    else:
        file.write_text("\n".join(map(json.dumps, tasks)) if suffix == "jsonl" else json.dumps(tasks))
    assert read_tasks([str(file)], "data.train_files") == tasks


def test_missing_or_unknown_task_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.train_files is not set"):
        read_tasks(None, "data.train_files")
    with pytest.raises(ConfigurationError, match=r"data\.val_files=tasks\.csv: tasks are read from"):
        read_tasks("tasks.csv", "data.val_files")
    with pytest.raises(ConfigurationError, match="val_dataset is empty"):
        entrypoint.run_ppo(None, [{"a": 1}], [])


def test_the_command_line_says_what_it_takes() -> None:
    command = [sys.executable, "-m", "ctxguard.integrations.agentlightning_v1", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "ctxguard.failure_handling=penalize(-1)" in said


def test_the_command_line_trains_with_its_configuration_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"task": "t"}\n')
    seen: list[Any] = []
    monkeypatch.setattr(entrypoint, "run_ppo", lambda *arguments: seen.extend(arguments))
    main([f"data.train_files={file}", f"data.val_files=[{file}]", "trainer.total_epochs=7"])
    config, train, val = seen
    assert (config.trainer.total_epochs, train, val) == (7, [{"task": "t"}], [{"task": "t"}])


class Recorded(GuardedTrainer):
    """Takes what the task runner gives a trainer, and runs nothing."""

    made: Any = None

    def __init__(self, **arguments: Any) -> None:
        Recorded.made = arguments

    def init_workers(self) -> None:
        Recorded.made["calls"] = ["init_workers"]

    def fit(self) -> None:
        Recorded.made["calls"].append("fit")


def test_the_task_runner_gives_the_trainer_what_agent_lightnings_own_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both runners' own ``run`` on a machine without a GPU, the workers and checks of verl left out."""
    from agentlightning.verl import trainer as theirs
    from verl.trainer import main_ppo
    from verl.utils import config as verl_config

    def runner(kind: type[Any], delegate: Any) -> Any:
        made = object.__new__(kind)
        parts = delegate(made)
        parts.role_worker_mapping, parts.mapping = {"role": "worker"}, {}
        parts.add_actor_rollout_worker = lambda config: ("actor", "group")
        parts.add_ref_policy_worker = lambda config, cls: None
        for name in ("add_critic_worker", "add_reward_model_resource_pool"):
            setattr(parts, name, lambda config: None)
        parts.init_resource_pool_mgr = lambda config: "pool"
        return made

    def its_delegate(made: Any) -> Any:
        made._delegate = SimpleNamespace()
        return made._delegate

    monkeypatch.setattr(verl_config, "validate_config", lambda **options: None)
    monkeypatch.setattr(main_ppo, "validate_config", lambda **options: None)
    monkeypatch.setattr(theirs, "AgentLightningRayPPOTrainer", Recorded)  # for 1.0.2's own, to compare with
    folder = write_tokenizer(cache_folder())

    def config() -> Any:
        return read_config([f"actor_rollout_ref.model.path={folder}"])

    data = entrypoint.LoadedDataset([{"task": "t"}])
    own = runner(_AglTaskRunner.__ray_metadata__.modified_class, its_delegate)
    own.run(config(), data, data)
    expected = Recorded.made
    ours = runner(entrypoint.GuardedTaskRunner, lambda made: made)
    ours.run(config(), data, data, Recorded)
    made = Recorded.made
    assert made is not expected
    assert made.keys() == expected.keys()
    assert made["calls"] == expected["calls"] == ["init_workers", "fit"]
    for name in (
        "config",
        "processor",
        "role_worker_mapping",
        "resource_pool_manager",
        "ray_worker_group_cls",
    ):
        assert made[name] == expected[name], name
    for name in ("train_dataset", "val_dataset", "collate_fn"):
        assert made[name] is expected[name], name
    assert type(made["tokenizer"]) is type(expected["tokenizer"])
    assert type(made["train_sampler"]) is type(expected["train_sampler"])


@pytest.fixture
def local_ray() -> Any:
    # The hook that Agent Lightning registers in each worker, as `run_ppo` asks for it.
    options = entrypoint._ray_options(read_config(["ray_kwargs.ray_init.num_cpus=2"]))
    assert options["runtime_env"]["worker_process_setup_hook"] == entrypoint.SETUP_HOOK
    options["runtime_env"].pop("worker_process_setup_hook")  # it patches vLLM, which is not here
    ray.init(**options, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_ray_worker_finds_task_runner_and_trainer_by_name(local_ray: Any) -> None:
    class Asked(entrypoint.GuardedTaskRunner):
        def run(self, config: Any, train: Any, val: Any, trainer_class: Any) -> Any:  # type: ignore[override]
            from agentlightning.verl.trainer import AgentLightningRayPPOTrainer

            return (
                trainer_class.__module__,
                issubclass(trainer_class, AgentLightningRayPPOTrainer),
                train[0]["task"],
            )

    actor = ray.remote(num_cpus=1)(Asked).remote()
    data = entrypoint.LoadedDataset([{"task": "t"}])
    answer = ray.get(actor.run.remote(read_config([]), data, data, GuardedTrainer), timeout=120)
    assert answer == ("ctxguard.integrations.agentlightning_v1.trainer", True, "t")
