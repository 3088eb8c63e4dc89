"""The settings of the example of Agent Lightning 1.0, as its own shell script hands them to our entry point."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from agentlightning.hooks import load_hooks
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from ctxguard import ContextBudget
from ctxguard.integrations.accounting import BatchAccount, FailureHandling
from ctxguard.integrations.agentlightning_v1.__main__ import read_config, read_tasks
from ctxguard.integrations.agentlightning_v1.adapter import AccountingAdapter
from ctxguard.integrations.agentlightning_v1.settings import GuardSettings
from examples.agentlightning_v1.agent import LogReader
from tests.agl1.rig import ROOT

FOLDER = ROOT / "examples" / "agentlightning_v1"


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """What ``train.sh`` starts, in the shell; the Python that it finds writes down its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "AGL_KEY": "its-key"}
    environment.pop("AGL_BASE_URL", None)
    command = ["sh", "examples/agentlightning_v1/train.sh", "trainer.total_epochs=2"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    first, module, *overrides = said.stdout.splitlines()
    assert (first, module) == ("-m", "ctxguard.integrations.agentlightning_v1")
    return read_config(overrides)


def test_the_scripts_settings_are_taken(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert (config.trainer.total_epochs, config.trainer.logger) == (2, ["console"])
    ours = config.agentlightning
    assert (ours.agl_base_url, ours.agl_key) == ("http://localhost:8080", "its-key")
    assert ours.local.agent_class == f"{LogReader.__module__}:{LogReader.__name__}"
    assert Path(ours.k8s.job_template_path).is_file()
    train, val = (read_tasks(config.data[name], f"data.{name}") for name in ("train_files", "val_files"))
    assert len(train) >= config.data.train_batch_size, "verl drops what does not fill a batch"
    paths = dict(ours.local.env_map)
    assert [sorted(task) for task in train + val] == [
        sorted(path.removeprefix("input.") for path in paths.values())
    ] * 8


def is_there(config: Any, key: str) -> bool:
    """Whether a configuration has a key, also one whose value must still be given."""
    parent, _, name = key.rpartition(".")
    return name in list(OmegaConf.select(config, parent) or ())


def test_every_setting_of_the_script_is_one_that_is_there_already(config: Any) -> None:
    """`read_config` takes keys of one's own too, so that a misspelt one would go unnoticed."""
    known = read_config([])
    text = (FOLDER / "train.sh").read_text(encoding="utf-8")
    keys = re.findall(r"^    ([a-z_.A-Z0-9]+)=", text, re.MULTILINE)
    free = ("agentlightning.local.env_map.", "actor_rollout_ref.rollout.engine_kwargs.vllm.", "ctxguard.")
    unknown = [key for key in keys if not key.startswith(free) and not is_there(known, key)]
    assert len(keys) > 20
    assert unknown == []


def test_verl_takes_the_configuration(config: Any) -> None:
    OmegaConf.resolve(config)
    validate_config(
        config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )


def test_settings_and_budget_are_read_from_it(config: Any) -> None:
    settings = GuardSettings.of(OmegaConf.to_container(config.ctxguard))
    assert settings.handling == FailureHandling.parse("exclude")
    assert settings.smallest_group_for(config.algorithm.adv_estimator) == 2
    budget = ContextBudget.from_verl(config)
    assert (budget.window, budget.level) == (20480, "trajectory")
    hooks: Any = load_hooks(str(FOLDER / "hooks.py"))
    assert hooks.budget == budget.model_copy(update={"source": "explicit"}), (
        "hooks.py tells the agents the same"
    )
    assert hooks.max_prompt_length == config.agentlightning.trace_aggregator.trajectory_max_prompt_length


def test_the_metrics_on_the_page_are_reported() -> None:
    """Those of a batch by the adapter; the trainer adds the others, and their names stand in its source."""
    page = (ROOT / "docs" / "agent-lightning-1.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(ctxguard/[a-z_/]+)`", page))
    account = BatchAccount({"a": "group", "b": "group"})
    adapter = AccountingAdapter(
        account=account,
        handling=FailureHandling.parse("exclude"),
        max_prompt_length=8,
        max_response_length=8,
        device="cpu",
        pad_token_id=0,
    )
    _, metrics = adapter.get_train_data_batch([])
    package = ROOT / "ctxguard" / "integrations" / "agentlightning_v1"
    source = "".join((package / name).read_text(encoding="utf-8") for name in ("trainer.py", "adapter.py"))
    assert len(named) > 8
    assert {name for name in named if name not in metrics and f'"{name}"' not in source} == set()
    assert {name for name in metrics if name.startswith("ctxguard/")} <= named | {
        "ctxguard/failed/not_returned"
    }
