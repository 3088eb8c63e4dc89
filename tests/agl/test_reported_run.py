"""The reported run, small: Qwen-Agent in text form with MCP tools, 4 tasks × 8 rollouts, prompts of 22,000 tokens and more.

Window 20480, max_prompt_length 12288, max_response_length 8192, truncation=error. The real vLLM, LLM proxy, store, runners
and daemon of Agent Lightning 0.3.0, and the real MCP servers over stdio.

The report's version, 0.1.2, died of the failures' bookkeeping (test_seed_v0.py, tests/agl_legacy). On 0.3.0 they go
unnoticed instead: refusals with status 400, rollouts failed with reward None, and their turns trained on as reward 0.
"""

from __future__ import annotations

import re
import time

import psutil
import pytest
import torch
from agentlightning.verl.daemon import AgentModeDaemon

from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from ctxguard.testing.tiny_model import cache_folder, write_hf_model
from tests.agl.qwen_tools.servers import PARTS, write_data
from tests.agl.rig import V1Rig, columns
from tests.vllm.serve import VllmServer

WINDOW, PROMPT, RESPONSE = 20480, 12288, 8192
TASKS = [{"shelf": shelf, "part": max(range(PARTS), key=lambda p: p * 7 % 59)} for shelf in range(4)]
ROLLOUTS = 8


@pytest.fixture(scope="module")
def vllm():
    folder = write_hf_model(cache_folder().with_name(f"tiny-qwen3-hf-{WINDOW}"), WINDOW)
    with VllmServer(folder, window=WINDOW, max_output_tokens=256) as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


class QuickDaemon(GuardedDaemon):
    poll_seconds = 0.2


def run(vllm, data, daemon_class, agent):
    """The batch of 32 through the real parts: the daemon, what the server logged, what the runners did."""
    with V1Rig(vllm.base_url, daemon_class=daemon_class, rollouts_per_task=ROLLOUTS) as rig:
        rig.daemon.set_up_data_and_server(columns(TASKS), [rig.backend], is_train=True)
        logged = len(vllm.log())  # behind the proxy's own request, which asks whether the server is there
        with rig.runners(
            f"tests.agl.qwen_tools.reported_agent:{agent}",
            processes=4,
            environment={"CTXGUARD_TEST_DATA": str(data)},
        ) as runners:
            rig.daemon.run_until_all_finished()
            statuses = [rig.attempt(rollout).status for rollout in rig.daemon._task_id_to_original_sample]
            batch, metrics = rig.daemon.get_train_data_batch(PROMPT, RESPONSE, torch.device("cpu"), 0)
            log = runners.output()
            results = dict(rig.daemon._completed_rollouts_v0)
    answered = re.findall(r'"POST /v1/chat/completions HTTP/1.1" (\d+)', vllm.log()[logged:])
    return results, statuses, batch, metrics, answered, log


def sizes(results):
    """Prompt sizes of all answered calls, in tokens, as the server counted them."""
    return [len(t.prompt["token_ids"]) for result in results.values() for t in result.triplets]


def test_unguarded_every_rollout_is_refused_and_trained_on_as_zero(vllm, data):
    results, statuses, batch, metrics, answered, log = run(vllm, data, AgentModeDaemon, "Unguarded")
    assert statuses == ["failed"] * 32
    assert [result.final_reward for result in results.values()] == [None] * 32
    assert answered.count("400") >= 32
    refused = [int(size) for size in re.findall(r"refused: a prompt of (\d+) tokens", log)]
    assert len(refused) == 32
    assert min(refused) > 22_000
    assert log.count("maximum context length is 20480 tokens") >= 32
    # Three good turns each, with a reward that nobody gave.
    assert len(batch) == 96
    assert batch.batch["token_level_scores"].sum() == 0
    assert metrics["training/reward"] == 0.0
    assert metrics["training/n_rollouts_w_reward"] == 0
    assert max(sizes(results)) > PROMPT


def test_guarded_every_rollout_is_accounted_for_and_every_prompt_fits(vllm, data):
    results, statuses, batch, metrics, answered, _ = run(vllm, data, QuickDaemon, "Guarded")
    assert statuses == ["succeeded"] * 32
    assert {result.final_reward for result in results.values()} <= {0.0, 1.0}
    assert (metrics["ctxguard/queued"], metrics["ctxguard/kept"], metrics["ctxguard/failed"]) == (32, 32, 0)
    assert set(answered) == {"200"}
    # Five calls each, and every one that the server answered is among them.
    assert len(sizes(results)) == answered.count("200") == 160
    assert max(sizes(results)) <= PROMPT
    assert len(batch) == 160
    assert not batch.batch["is_drop_mask"].any()


def test_no_mcp_server_outlives_its_runner(data):
    deadline = time.monotonic() + 10
    while left := [
        p for p in psutil.process_iter(["cmdline"]) if str(data) in " ".join(p.info["cmdline"] or ())
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
