"""Long tasks of the examples' agents under the real runner, store and LLM proxy, before a real vLLM with a small window:
they fail unguarded and are finished guarded; and a batch with a task that cannot be made to fit."""

from __future__ import annotations

import json
import re

import pytest
import torch
from agentlightning.emitter.reward import find_final_reward

from ctxguard import ChatTemplateCounter
from ctxguard.integrations.agentlightning.sent import SENT_MESSAGES
from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from tests.agl.rig import V1Rig, columns

WINDOW, PROMPT = 2048, 1792
FITS = {"agent": "guarded reader", "seed": 0, "hours": 2, "requests": 10}
NEVER_FITS = {**FITS, "requests": 400}
LONG = {
    "reader": [{"seed": seed, "hours": 8, "requests": 20} for seed in range(2)],
    "finder": [{"find": find, "functions": 12} for find in ("nothing", "getdoc")],
}
CALLS = {"reader": 8, "finder": 12}


class QuickDaemon(GuardedDaemon):
    poll_seconds, max_quiet_seconds = 0.1, 60.0  # runners take a while to start


@pytest.fixture(scope="module")
def parts(vllm_server, qwen3_folder):
    """The rig, whose daemon has run one batch, and its runner."""
    with (
        V1Rig(vllm_server.base_url, daemon_class=QuickDaemon, rollouts_per_task=2) as rig,
        rig.runners(
            "tests.agl.long_task_agents:ByTask", environment={"TOKENIZER": str(qwen3_folder)}
        ) as runners,
    ):
        rig.daemon.set_up_data_and_server(columns([FITS, NEVER_FITS]), [rig.backend], is_train=True)
        rig.daemon.run_until_all_finished()
        yield rig, runners


def run(parts, agent, kind):
    """The long tasks by one of the agents: their rollouts' ids and statuses, and what the runner logged."""
    rig, runners = parts
    logged = len(runners.output())
    ids = rig.enqueue([{**task, "agent": f"{kind} {agent}"} for task in LONG[agent]])
    ended = rig.wait(ids)
    return ids, [ended[rollout_id].status for rollout_id in ids], runners.output()[logged:]


def test_a_task_that_can_never_fit_leaves_the_batch(parts):
    daemon = parts[0].daemon
    batch, metrics = daemon.get_train_data_batch(PROMPT, WINDOW - PROMPT, torch.device("cpu"), 0)
    assert (metrics["ctxguard/queued"], metrics["ctxguard/kept"]) == (4, 2)
    assert metrics["ctxguard/failed"] == metrics["ctxguard/failed/context_overflow"] == 2
    samples = daemon._task_id_to_original_sample
    good = [rollout for rollout, sample in samples.items() if sample["requests"] == FITS["requests"]]
    assert sorted(batch.non_tensor_batch["rollout_id_list"]) == sorted(good * FITS["hours"])
    assert not batch.batch["is_drop_mask"].any()


@pytest.mark.parametrize("agent", LONG)
def test_unguarded_the_long_tasks_are_refused(parts, agent):
    ids, statuses, log = run(parts, agent, "unguarded")
    assert statuses == ["failed"] * len(ids)
    # A prompt that fills the window to the token is refused with other words.
    refusals = rf"maximum context length is {WINDOW} tokens|max_tokens must be at least 1, got 0"
    assert len(re.findall(refusals, log)) >= len(ids)
    assert all(0 < len(parts[0].triplets(rollout_id)) < CALLS[agent] for rollout_id in ids)


@pytest.mark.parametrize("agent", LONG)
def test_guarded_they_are_finished_with_the_ids_of_the_fitted_prompts(parts, agent, qwen3_folder):
    ids, statuses, log = run(parts, agent, "guarded")
    assert statuses == ["succeeded"] * len(ids), log
    rig, counter = parts[0], ChatTemplateCounter.from_folder(qwen3_folder)
    for rollout_id in ids:
        spans = rig.spans(rollout_id)
        assert find_final_reward(spans) is not None
        prompts = [triplet.prompt["token_ids"] for triplet in rig.triplets(rollout_id)]
        assert len(prompts) == CALLS[agent]
        assert max(map(len, prompts)) <= PROMPT
        # From the first compaction on, no prompt is what the agent passed; each is what the guard sent.
        sent = [json.loads(s.attributes[SENT_MESSAGES]) for s in spans if SENT_MESSAGES in s.attributes]
        assert 0 < len(sent) < CALLS[agent]
        assert prompts[-len(sent) :] == [counter.ids(messages) for messages in sent]
