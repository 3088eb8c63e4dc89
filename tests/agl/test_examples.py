"""The examples for Agent Lightning 0.3 run as users run them, and train with settings that verl accepts."""

from __future__ import annotations

import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import agentlightning as agl
import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic
from verl.utils.config import validate_config

from ctxguard import ContextBudget
from ctxguard.integrations.agentlightning import client
from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer
from ctxguard.testing.child_process import free_port
from ctxguard.testing.llama_cpp import LlamaCppServer
from ctxguard.testing.tiny_model import cache_folder, write_gguf
from tests.agl.rig import MODEL, run_apart

SCRIPTS = ["agentlightning_litagent", "agentlightning_qwen_agent", "agentlightning_rollout"]


@pytest.fixture(scope="module")
def outputs(qwen3_folder):
    """What each script printed, run as users run it. They wait most of the time, so they run together."""

    def run(script):
        own = {"AGL_SERVER_PORT": str(free_port())}
        return run_apart(f"examples.{script}", environment={**environment, **own})

    # The real llama.cpp with the window that the examples are trained with.
    with LlamaCppServer(write_gguf(cache_folder()), window=20480) as server, ThreadPoolExecutor() as pool:
        environment = {"OPENAI_BASE_URL": server.base_url, "MODEL": MODEL, "TOKENIZER": str(qwen3_folder)}
        return dict(zip(SCRIPTS, pool.map(run, SCRIPTS), strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_rollout_succeeds(script, outputs):
    assert re.findall(r"Finished with status\s+(\w+)", outputs[script]) == ["succeeded"], outputs[script]


@pytest.mark.filterwarnings("ignore:Disabled critic:UserWarning")
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_hands_the_guarded_classes_and_a_valid_configuration_to_the_trainer(script, monkeypatch):
    """Everything that ``--train`` does short of `Trainer.fit`, which needs a GPU."""
    fitted = []
    monkeypatch.setattr(
        agl.Trainer, "fit", lambda trainer, agent, *data, **more: fitted.append((trainer, agent, data, more))
    )
    monkeypatch.setattr(client, "_guard", None)  # the script sets the guard of the process
    monkeypatch.setattr(sys, "argv", [script, "--train"])
    main = runpy.run_module(f"examples.{script}", run_name="__main__")

    ((trainer, agent, (tasks,), more),) = fitted
    assert isinstance(agent, agl.LitAgent)
    assert more["val_dataset"] == tasks  # without one, verl looks for a file
    assert (trainer.algorithm.daemon_cls, trainer.algorithm.trainer_cls) == (GuardedDaemon, GuardedTrainer)

    config = trainer.algorithm.config
    OmegaConf.resolve(config)
    assert len(tasks) >= config.data.train_batch_size
    assert not need_critic(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert ContextBudget.from_verl(config) == ContextBudget.from_verl(main["CONFIG"])
    assert client.default_guard().budget == ContextBudget.from_verl(config)
