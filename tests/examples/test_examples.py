"""Every example script runs, against a small real server."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ctxguard import ChatTemplateCounter
from ctxguard.testing import ScriptedModel, WindowedServer, tool_call
from ctxguard.testing.tiny_model import cache_folder, write_tokenizer

WINDOW = 4_096
EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__")


@pytest.fixture
def counter():
    return ChatTemplateCounter.from_folder(write_tokenizer(cache_folder()))


@pytest.fixture
def serve(counter, monkeypatch):
    """Starts a server and sets the environment that the scripts read."""
    servers = []

    def start(window=WINDOW, script=lambda messages, tools: "nothing"):
        server = WindowedServer(counter, window=window, model=ScriptedModel(script)).start()
        servers.append(server)
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("MODEL", server.model_name)
        monkeypatch.setenv("TOKENIZER", str(cache_folder()))
        monkeypatch.delenv("WINDOW", raising=False)
        return server

    yield start
    for server in servers:
        server.stop()


def run(script):
    return importlib.import_module(f"examples.{script}").main()


def statuses(server):
    return {record.status for record in server.completions}


def largest(server):
    return max(record.prompt_tokens for record in server.completions)


def test_every_script_is_tested_and_short():
    tested_here = ["custom_strategy", "guarded_rollout_example", "verl_budget", "wrap_a_client"]
    tested_in_agl = ["agentlightning_litagent", "agentlightning_qwen_agent", "agentlightning_rollout"]
    assert sorted(tested_in_agl + tested_here) == SCRIPTS
    for script in SCRIPTS:
        assert len((EXAMPLES / f"{script}.py").read_text().splitlines()) < 60, script


def test_a_wrapped_client_carries_a_conversation_past_the_window(serve, capsys):
    server = serve()
    run("wrap_a_client")
    assert statuses(server) == {200}
    assert len(server.requests) == 24
    assert largest(server) <= WINDOW - 64
    assert len(capsys.readouterr().out.splitlines()) == 24


def test_a_guarded_rollout_ends_in_one_outcome(serve, capsys):
    server = serve(script=[tool_call("read_page", {"number": n}) for n in range(20)] + ["It was stormy."])
    succeeded, failed = run("guarded_rollout_example")
    assert (succeeded.status, succeeded.reward) == ("succeeded", 1.0)
    assert succeeded.calls.compacted > 0
    assert (failed.status, failed.failure.reason.value) == ("failed", "context_overflow")
    assert failed.failure.numbers["prompt_tokens"] > failed.failure.numbers["limit"] == WINDOW - 256
    assert statuses(server) == {200}
    assert "failed: context_overflow" in capsys.readouterr().out


def test_a_budget_from_a_verl_configuration_holds(serve, capsys):
    server = serve(window=20_480)
    run("verl_budget")
    out = capsys.readouterr().out
    assert "window 20480, prompt at most 12288, response 8192" in out
    assert "refused: data.max_prompt_length 16384" in out
    assert statuses(server) == {200}
    assert largest(server) <= 12_288


def test_a_custom_strategy_is_the_first_to_make_room(serve, capsys):
    server = serve()
    run("custom_strategy")
    assert statuses(server) == {200}
    assert largest(server) <= WINDOW - 64
    compactions = capsys.readouterr().out.splitlines()
    assert compactions
    assert all("('DropRepeatedResults'" in line for line in compactions)
