"""The example of Agent Lightning 1.0: its agent under the real controller, its hooks file, its Kubernetes job."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from agentlightning.controller.k8s_reconciler import build_job_spec
from agentlightning.hooks import load_hooks
from agentlightning.verl.agl_rollout_manager import AglRolloutManager
from omegaconf import OmegaConf

from ctxguard import ChatTemplateCounter
from ctxguard.integrations.agentlightning_v1.hooks import FailedRolloutHooks
from ctxguard.integrations.agentlightning_v1.manager import GuardedRolloutManager
from ctxguard.integrations.agentlightning_v1.settings import GuardSettings
from ctxguard.testing import WindowedServer, tool_call
from ctxguard.testing.llama_cpp import LlamaCppServer
from ctxguard.testing.tiny_model import cache_folder, write_tokenizer
from examples.agentlightning_v1.agent import LogReader, find_hour, read_log
from tests.agl1.conftest import WINDOW
from tests.agl1.rig import KEY, ROOT, Agl1, kinds, marks

FOLDER = ROOT / "examples" / "agentlightning_v1"
PAGE = ROOT / "docs" / "agent-lightning-1.md"
LOCAL = {
    "local_agent_class": f"{LogReader.__module__}:{LogReader.__name__}",
    "local_env_map": {"TASK": "input.task", "ANSWER": "input.answer"},
}
TASKS: list[dict[str, str]] = [
    json.loads(line) for line in (FOLDER / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
]
NEVER_FITS = {"task": "Explain this log: " + "error " * 20_000, "answer": "1"}

HOOKS: Any = load_hooks(str(FOLDER / "hooks.py"))
BUDGET = HOOKS.budget


def failed_requests(hour: int) -> int:
    return read_log(json.dumps({"hour": hour})).count(" 500")


def reader(messages: list[Any], tools: list[Any]) -> Any:
    """A model that solves the task: it reads hour after hour and notes the worst so far, as it is told to."""
    first, last = map(int, re.findall(r"\d+", messages[1]["content"])[:2])
    notes = [message for message in messages if message["role"] == "assistant"]
    if not notes:
        return {"role": "assistant", "content": "", "tool_calls": [tool_call("read_log", {"hour": first})]}
    hour = json.loads(notes[-1]["tool_calls"][0]["function"]["arguments"])["hour"]
    now = (messages[-1]["content"].count(" 500"), hour)
    noted = re.findall(r"(\d+) in (\d+)", notes[-1]["content"])
    most, at = max([now, *[(int(most), int(at)) for most, at in noted]])
    if hour == last:
        return f"Hour {at}"
    call = tool_call("read_log", {"hour": hour + 1})
    return {"role": "assistant", "content": f"So far: {most} in {at}.", "tool_calls": [call]}


@pytest.fixture(scope="module")
def backend() -> Iterator[WindowedServer]:
    """A server with the window that the example trains with."""
    counter = ChatTemplateCounter.from_folder(write_tokenizer(cache_folder()))
    with WindowedServer(counter, window=BUDGET.window, model=reader, model_name="tiny-qwen3") as server:
        yield server


def batch(*tasks: dict[str, str]) -> dict[str, Any]:
    return {name: np.array([task[name] for task in tasks], dtype=object) for name in ("task", "answer")}


def run(manager: Any, *tasks: dict[str, str]) -> list[Any]:
    """What becomes of the tasks under the real controller, in their order."""
    done = manager.enqueue_and_wait_until_completed(batch(*tasks), is_train=True)
    return sorted(done, key=lambda rollout: rollout.sample_idx_in_step)


# The agent


def test_the_answers_of_the_tasks_are_right_and_there_is_but_one() -> None:
    for task in TASKS:
        first, last = map(int, re.findall(r"\d+", task["task"])[:2])
        counts = {hour: failed_requests(hour) for hour in range(first, last + 1)}
        assert [hour for hour in counts if counts[hour] == max(counts.values())] == [int(task["answer"])]
    assert len((FOLDER / "agent.py").read_text(encoding="utf-8").splitlines()) < 60


def test_unguarded_the_conversation_outgrows_the_window(backend: WindowedServer) -> None:
    with (
        openai.OpenAI(base_url=backend.base_url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="maximum context length is 20480 tokens"),
    ):
        find_hour(client, TASKS[0]["task"])


@pytest.mark.parametrize("told_by", ["trainer", "hooks"])
def test_the_agent_finishes_what_would_overflow(agl1: Agl1, backend: WindowedServer, told_by: str) -> None:
    """It is told its budget through the gateway; all that it sends fits, and it earns its reward."""
    backend.forget()
    if told_by == "hooks":
        HOOKS.base_url, HOOKS.key = agl1.url, agl1.key
        manager = agl1.manager(AglRolloutManager, "", [backend.base_url], **LOCAL, hooks=HOOKS)
    else:
        manager = agl1.manager(GuardedRolloutManager, "", [backend.base_url], **LOCAL)
        manager.told = replace(manager.told, budget=BUDGET)
    (rollout,) = run(manager, TASKS[0])
    assert (rollout.rollout_state, rollout.final_reward) == ("succeeded", 1.0), agl1.log()
    assert kinds(rollout) == ["model_request 200"] * 25 + ["reward"]
    completions = backend.completions
    assert {record.status for record in completions} == {200}
    assert len(completions) == 25
    sent = [record.prompt_tokens + record.body["max_tokens"] for record in completions]
    assert max(sent) <= BUDGET.window


def test_the_agent_finds_the_window_of_a_real_server_by_itself(
    agl1: Agl1, llama_cpp_server: LlamaCppServer
) -> None:
    """Told no budget. The tiny model calls no tool and says nothing of use: a rollout that succeeds with reward 0."""
    manager = agl1.manager(GuardedRolloutManager, "", [llama_cpp_server.base_url], **LOCAL)
    good, failed = run(manager, TASKS[0], NEVER_FITS)
    assert (good.rollout_state, good.final_reward) == ("succeeded", 0.0), agl1.log()
    assert kinds(good) == ["model_request 200", "reward"]
    (call, _) = good.events
    assert call["data"]["request"]["max_tokens"] == WINDOW // 4

    assert (failed.rollout_state, failed.final_reward) == ("failed", None)
    assert kinds(failed) == ["ctxguard.failed"]
    (mark,) = marks(failed)
    assert (mark["reason"], mark["numbers"]["window"]) == ("context_overflow", WINDOW)
    assert mark["numbers"]["prompt_tokens"] > 20_000


# The hooks file


def test_the_loader_takes_the_hooks_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_BASE_URL", "http://agl-server:8080")
    hooks = load_hooks(str(FOLDER / "hooks.py"))
    hooks.on_startup()
    assert isinstance(hooks, FailedRolloutHooks)
    assert type(hooks).__name__ == "LogReaderHooks"


def test_the_other_form_in_its_docstring_is_taken_too(tmp_path: Path) -> None:
    text = (FOLDER / "hooks.py").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (from .+ import FailedRolloutHooks)$", text, re.MULTILINE)
    file = tmp_path / "hooks.py"
    file.write_text(f"{line}\n", encoding="utf-8")
    assert type(load_hooks(str(file))) is FailedRolloutHooks


# The Kubernetes job


def controller(url: str) -> Any:
    """The controller's own configuration, its agents in a cluster."""
    text = (importlib.resources.files("agentlightning") / "config" / "controller.yaml").read_text("utf-8")
    ours = {"agl_server": {"url": "http://localhost:8080", "agent_url": url, "key": KEY}}
    return OmegaConf.merge(OmegaConf.create(text), ours)


def job_of(server: Agl1, manager: Any, task: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """A queued rollout's id and the job that the real controller makes of it."""
    (queued,) = manager._create_rollouts(batch(task), is_train=True)
    job = build_job_spec(manager._get_rollout(queued.rollout_id), controller(server.url))
    return queued.rollout_id, job


def test_the_controller_renders_the_job(server_only: Agl1) -> None:
    manager = server_only.manager(
        AglRolloutManager, "", local_agent_class=None, k8s_job_template_path=str(FOLDER / "job.yaml")
    )
    awkward = {"task": 'Say "hi": {{ input }} # no\n- and {x: y}', "answer": "007"}
    rollout, job = job_of(server_only, manager, awkward)
    spec = job["spec"]
    assert (job["kind"], job["metadata"]["name"]) == ("Job", f"agl-rollout-{rollout}")
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert spec["activeDeadlineSeconds"] == 120, "of the rig; a rollout that hangs is ended"
    (container,) = spec["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment == {
        "TASK": awkward["task"],
        "ANSWER": awkward["answer"],
        "TOKENIZER": "/app/tokenizer",
        "AGL_OPENAI_BASE_URL": f"{server_only.url}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1",
        "AGL_EVENT_URL": f"{server_only.url}/api/rollouts/{rollout}/attempt/0/events",
        "AGL_KEY": KEY,
    }


def test_an_attempt_that_failed_is_not_run_again_by_the_template_alone() -> None:
    """What the controller sets stands in the file too: nobody who reads it or applies it by hand is misled."""
    text = (FOLDER / "job.yaml").read_text(encoding="utf-8")
    assert "backoffLimit: 0\n" in text
    assert "restartPolicy: Never\n" in text


@pytest.mark.parametrize(
    ("task", "status", "events"),
    [
        (TASKS[3], 0, ["model_request"] * 7 + ["reward"]),
        (NEVER_FITS, 1, ["ctxguard.failed"]),
    ],
    ids=["good", "never fits"],
)
def test_the_jobs_command_runs_without_agent_lightning(
    server_only: Agl1, backend: WindowedServer, task: dict[str, str], status: int, events: list[str]
) -> None:
    """The rendered command in the rendered environment, in a Python that cannot import Agent Lightning."""
    manager = server_only.manager(
        GuardedRolloutManager,
        "",
        [backend.base_url],
        local_agent_class=None,
        k8s_job_template_path=str(FOLDER / "job.yaml"),
    )
    rollout, job = job_of(server_only, manager, task)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    python, script = container["command"]
    assert (python, script) == ("python", "/app/agent.py")
    code = "import runpy, sys; sys.modules['agentlightning'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    environment |= {"TOKENIZER": str(cache_folder()), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", code, str(FOLDER / "agent.py")]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    recorded = server_only.get(f"/api/rollouts/{rollout}/events")
    assert [event["event_type"] for event in recorded] == events


# The page


def tables() -> list[list[str]]:
    lines = re.findall(r"^\|(.+)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split("|")] for line in lines]


def test_the_settings_on_the_page_are_the_codes() -> None:
    said = {
        cells[0].removeprefix("ctxguard."): cells[1] for cells in tables() if cells[0].startswith("ctxguard.")
    }
    assert said == {name: repr(field.default) for name, field in GuardSettings.model_fields.items()}


def test_what_the_page_quotes_stands_in_the_example() -> None:
    quoted = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    files = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.is_file()]
    assert quoted
    assert [text for text in quoted if not any(text in file for file in files)] == []


def test_commands_on_page_and_readme_are_the_same() -> None:
    def commands(file: Path) -> set[str]:
        fences = re.findall(r"^```sh\n(.*?)^```$", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        return {line for fence in fences for line in fence.splitlines()}

    assert commands(FOLDER / "README.md") <= commands(PAGE)
