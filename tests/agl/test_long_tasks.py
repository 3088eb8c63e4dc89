"""Long tasks of the examples' agents under the real runner, store and LLM proxy, before a real vLLM with a small window:
they fail unguarded and are finished guarded; and a batch with a task that cannot be made to fit."""

from __future__ import annotations

import json

import pytest
import torch
from agentlightning.emitter.reward import find_final_reward

from ctxguard.integrations.agentlightning.sent import SENT_MESSAGES
from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from tests.agl.rig import V1Rig, columns
from tests.agl.test_tracing import ids_of

AGENTS = "tests.agl.long_task_agents"
WINDOW, PROMPT = 2048, 1792
LOGS = [{"seed": seed, "hours": 8, "requests": 20} for seed in range(2)]
SOURCE = [{"find": find, "functions": 12} for find in ("nothing", "getdoc")]


class QuickDaemon(GuardedDaemon):
    poll_seconds = 0.1


@pytest.fixture(scope="module")
def rig(vllm_server):
    with V1Rig(vllm_server.base_url) as rig:
        yield rig


@pytest.fixture
def environment(qwen3_folder):
    return {"TOKENIZER": str(qwen3_folder)}


def run(rig, agent, tasks, environment):
    """The tasks' rollouts by one agent: their ids, their statuses, and the runner's log."""
    with rig.runners(f"{AGENTS}:{agent}", environment=environment) as runners:
        ids = rig.enqueue(tasks)
        ended = rig.wait(ids)
        return ids, [ended[rollout_id].status for rollout_id in ids], runners.output()


@pytest.mark.parametrize(
    ("guarded", "unguarded", "tasks", "calls"),
    [("LogReader", "UnguardedLogReader", LOGS, 8), ("finder", "unguarded_finder", SOURCE, 12)],
)
def test_long_tasks_are_finished_guarded_and_fail_unguarded(
    rig, environment, qwen3_folder, guarded, unguarded, tasks, calls
):
    ids, statuses, log = run(rig, unguarded, tasks, environment)
    assert statuses == ["failed"] * len(tasks)
    assert log.count(f"maximum context length is {WINDOW} tokens") >= len(tasks)
    assert all(0 < len(rig.triplets(rollout_id)) < calls for rollout_id in ids)

    ids, statuses, log = run(rig, guarded, tasks, environment)
    assert statuses == ["succeeded"] * len(tasks), log
    for rollout_id in ids:
        spans = rig.spans(rollout_id)
        assert find_final_reward(spans) is not None
        prompts = [triplet.prompt["token_ids"] for triplet in rig.triplets(rollout_id)]
        assert len(prompts) == calls
        assert max(map(len, prompts)) <= PROMPT
        # From the first compaction on, no prompt is what the agent passed; each is what the guard sent.
        sent = [json.loads(s.attributes[SENT_MESSAGES]) for s in spans if SENT_MESSAGES in s.attributes]
        assert 0 < len(sent) < calls
        assert prompts[-len(sent) :] == [ids_of(qwen3_folder, messages) for messages in sent]


def test_a_task_that_can_never_fit_leaves_the_batch(vllm_server, environment):
    tasks = [{"seed": 0, "hours": 2, "requests": 10}, {"seed": 0, "hours": 2, "requests": 400}]
    with (
        V1Rig(vllm_server.base_url, daemon_class=QuickDaemon, rollouts_per_task=2) as rig,
        rig.runners(f"{AGENTS}:LogReader", environment=environment),
    ):
        rig.daemon.set_up_data_and_server(columns(tasks), [rig.backend], is_train=True)
        samples = dict(rig.daemon._task_id_to_original_sample)
        rig.daemon.run_until_all_finished()
        batch, metrics = rig.daemon.get_train_data_batch(PROMPT, WINDOW - PROMPT, torch.device("cpu"), 0)
    assert (metrics["ctxguard/queued"], metrics["ctxguard/kept"]) == (4, 2)
    assert metrics["ctxguard/failed"] == metrics["ctxguard/failed/context_overflow"] == 2
    good = [rollout for rollout, sample in samples.items() if sample["requests"] == 10]
    assert sorted(batch.non_tensor_batch["rollout_id_list"]) == sorted(good * 2)  # two calls each
    assert not batch.batch["is_drop_mask"].any()
