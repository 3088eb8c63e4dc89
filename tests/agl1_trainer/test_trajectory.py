"""Trajectory-level aggregation: agents on a real vLLM behind the real gateway, their rows by the real 1.0.2 adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from agentlightning.verl.agl_rollout_manager import AglRolloutManager
from agentlightning.verl.rollout_adapter import RolloutAdapter

from ctxguard import ChatTemplateCounter
from ctxguard.integrations.agentlightning_v1 import Gateway
from tests.agl1.rig import Agl1, tasks
from tests.trajectories import BEHIND, FIRST, SCENARIOS, Rollout, Turn, expected, row_budget, rows_of, run
from tests.vllm.serve import VllmServer

pytestmark = pytest.mark.vllm

NAMES = (
    "words",
    "native calls",
    "thinking that stays in the prompt",
    "thinking that the template strips",
    "repeated calls and answers",
)


@dataclass
class Done:
    """What an agent did, and what the manager read of it."""

    rollout: Rollout
    completed: Any


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agl1]:
    """The real gateway. The agents run in this process, and have the key that `run` uses."""
    with Agl1(tmp_path_factory.mktemp("gateway"), runs_agents=False, key="k") as running:
        yield running


@pytest.fixture(scope="module")
def counter(vllm_server: VllmServer) -> ChatTemplateCounter:
    return ChatTemplateCounter.from_folder(vllm_server.model_folder)


def through_gateway(
    name: str, server: Agl1, vllm: VllmServer, counter: ChatTemplateCounter, *, guarded: bool
) -> Done:
    manager = server.manager(AglRolloutManager, "", [vllm.base_url])
    (queued,) = manager._create_rollouts(tasks({}), is_train=True)
    path = f"{queued.rollout_id}/attempt/0"
    budget = row_budget(vllm.window) if guarded else None
    rollout = run(SCENARIOS[name], f"{server.url}/proxy/rollout/{path}/mode/train/openai/v1", counter, budget)
    Gateway("", f"{server.url}/api/rollouts/{path}/events", "k").post("reward", {"value": 1.0})
    for state in ("running", "succeeded"):
        manager.client.patch(f"/api/rollouts/{queued.rollout_id}", json={"status": {"state": state}})
    return Done(rollout, manager._build_completed_rollout(queued, manager._get_rollout(queued.rollout_id)))


@pytest.fixture(scope="module")
def guarded(server: Agl1, vllm_server: VllmServer, counter: ChatTemplateCounter) -> dict[str, Done]:
    return {name: through_gateway(name, server, vllm_server, counter, guarded=True) for name in NAMES}


def batch_of(done: Done) -> tuple[Any, dict[str, Any]]:
    adapter = RolloutAdapter(
        max_prompt_length=FIRST,
        max_response_length=BEHIND,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    batch, metrics = adapter.get_train_data_batch([done.completed])
    return batch, metrics


def kept_of(turns: list[Turn]) -> list[Turn]:
    """Of calls with the same prompt, 1.0.2's server keeps the last, in the place of its own."""
    return [turn for i, turn in enumerate(turns) if turn[0] not in [later[0] for later in turns[i + 1 :]]]


@pytest.mark.parametrize("name", NAMES)
def test_no_row_is_cut_or_dropped_and_the_generated_ids_are_trained(
    name: str, guarded: dict[str, Done]
) -> None:
    rollout = guarded[name].rollout
    assert rollout.ended_by is None
    assert rollout.conditional == ""
    assert len(rollout.turns) == SCENARIOS[name].turns * (1 + SCENARIOS[name].repeats)
    kept = kept_of(rollout.turns)
    assert (len(kept) < len(rollout.turns)) == SCENARIOS[name].repeats
    merged = Rollout(turns=kept)
    batch, metrics = batch_of(guarded[name])
    assert rows_of(batch, first=FIRST) == [expected(row) for row in merged.rows]
    assert metrics["training/n_truncated_sample"] == 0
    trained = [token for row in rows_of(batch, first=FIRST) for token in row.trained]
    assert trained == [token for _, generated in kept for token in generated]


def test_a_compaction_starts_a_row_and_nothing_else_does(guarded: dict[str, Done]) -> None:
    for name in ("words", "native calls", "thinking that stays in the prompt"):
        done = guarded[name]
        batch, metrics = batch_of(done)
        assert done.rollout.compactions >= 1
        assert len(batch) == 1 + done.rollout.compactions
        assert metrics["training/n_trace_merge_mismatch_rows"] == done.rollout.compactions


def test_unguarded_rows_are_cut_or_dropped(
    server: Agl1, vllm_server: VllmServer, counter: ChatTemplateCounter
) -> None:
    done = through_gateway("words", server, vllm_server, counter, guarded=False)
    batch, metrics = batch_of(done)
    dropped = sum(row.dropped for row in rows_of(batch, first=FIRST))
    assert metrics["training/n_truncated_sample"] + dropped > 0
