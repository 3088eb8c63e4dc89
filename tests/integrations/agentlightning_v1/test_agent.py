"""The agent's side where the server is out of reach or not there at all; with a server see tests/agl1."""

from __future__ import annotations

import inspect
import logging
import socket
from typing import Any

import openai
import pytest

from ctxguard import Guard
from ctxguard.budget import ContextBudget
from ctxguard.client.served import ModelServer
from ctxguard.errors import ConfigurationError, RolloutFailedError, ServerUnavailableError
from ctxguard.integrations.agentlightning_v1 import Gateway, gateway, guarded_client, guarded_run
from ctxguard.integrations.agentlightning_v1.gateway import Told, reward_in
from ctxguard.scope import current_scope


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """The controller's variables, with a server that nobody runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(gateway, "TRIES", 1)
    monkeypatch.setenv("AGL_OPENAI_BASE_URL", f"{url}/proxy/rollout/r7/attempt/0/mode/train/openai/v1")
    monkeypatch.setenv("AGL_EVENT_URL", f"{url}/api/rollouts/r7/attempt/0/events")
    monkeypatch.setenv("AGL_KEY", "secret")
    return url


def test_the_agents_own_error_is_raised_and_the_lost_mark_is_loud(
    nobody: str, caplog: pytest.LogCaptureFixture
) -> None:
    @guarded_run
    def run() -> float:
        raise LookupError("the tool went away")

    with caplog.at_level(logging.ERROR, "ctxguard"), pytest.raises(LookupError, match="the tool went away"):
        run()
    assert "rollout r7 failed (exception), and its mark was not taken" in caplog.text
    assert "secret" not in caplog.text


async def test_a_reward_that_cannot_be_posted_is_no_success(nobody: str) -> None:
    @guarded_run(require_calls=False)
    async def run() -> float:
        return 1.0

    with pytest.raises(ServerUnavailableError, match=r"POST .*/api/rollouts/r7/attempt/0/events"):
        await run()


def test_a_reward_that_was_posted_already_is_not_posted_again(nobody: str) -> None:
    @guarded_run(require_calls=False, post_reward=False)
    def run() -> float:
        return 1.0

    assert run() == 1.0


def test_a_failure_without_an_error_raises_one_with_its_facts(nobody: str) -> None:
    @guarded_run
    def run() -> float:
        return 1.0

    with pytest.raises(RolloutFailedError, match="rollout r7 failed: no_calls") as raised:
        run()
    assert (raised.value.reason, raised.value.rollout_id, raised.value.attempt_id) == ("no_calls", "r7", "0")


def test_the_scope_is_the_rollouts_and_the_decorated_keeps_its_shape(nobody: str) -> None:
    class Agent:
        @guarded_run(require_calls=False, post_reward=False, reward_of=lambda answer: answer["reward"])
        def run(self, extra: int = 3) -> dict[str, float]:
            """The agent's run."""
            scope = current_scope()
            assert scope is not None
            assert (scope.rollout_id, scope.attempt_id) == ("r7", "0")
            return {"reward": extra / 4}

        @guarded_run
        async def arun(self) -> None:
            """Async."""

    assert Agent().run() == {"reward": 0.75}, "what it returned, not the reward alone"
    assert list(inspect.signature(Agent.run).parameters) == ["self", "extra"]
    assert Agent.run.__doc__ == "The agent's run."
    assert inspect.iscoroutinefunction(Agent.arun)
    assert not inspect.iscoroutinefunction(Agent.run)


def test_a_reward_of_that_breaks_fails_the_rollout(nobody: str) -> None:
    @guarded_run(require_calls=False, reward_of=lambda answer: answer["reward"])
    def run() -> dict[str, float]:
        return {}

    with pytest.raises(KeyError):
        run()


def test_without_the_controllers_variables_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="AGL_OPENAI_BASE_URL and AGL_EVENT_URL not set"):
        guarded_client(4096)
    monkeypatch.setenv("AGL_OPENAI_BASE_URL", "http://agl/v1")
    monkeypatch.setenv("AGL_EVENT_URL", "http://agl/events")
    with pytest.raises(ConfigurationError, match="'http://agl/events' is no event address"):
        Gateway.from_environment()


def test_a_client_comes_from_the_environment(nobody: str, caplog: pytest.LogCaptureFixture) -> None:
    with guarded_client(4096) as client:
        assert str(client.base_url) == f"{nobody}/proxy/rollout/r7/attempt/0/mode/train/openai/v1/"
        assert (client.api_key, client.max_retries) == ("secret", 6)
        assert isinstance(client, openai.OpenAI)
    assert "the trainer's budget could not be read" in caplog.text

    own = Guard(ContextBudget(window=512))
    with guarded_client(guard=own, client_options={"max_retries": 0, "timeout": 5}) as client:
        assert type(client)._ctxguard is own
        assert (client.max_retries, client.timeout) == (0, 5)
    assert isinstance(guarded_client(4096, client_class=openai.AsyncOpenAI), openai.AsyncOpenAI)


# What the trainer's side tells


def test_what_is_told_comes_back() -> None:
    budget = ContextBudget(
        window=20480, max_prompt_tokens=12288, max_response_tokens=8192, level="trajectory"
    )
    told = Told(budget, ("http://b/v1", "http://a/v1"), "Qwen/Qwen3-8B")
    assert Told.read(told.to_dict()) == told
    assert Told.read(None) == Told.read({"mine": 1}) == Told()


@pytest.mark.parametrize("rollout", ["f00", "ba2", "c0ffee"])
def test_the_model_server_is_the_one_that_the_gateway_takes(
    rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.0.2 ``server/proxy.py``, ``select_server``: sorted endpoints, numbered by the rollout id's SHA-256."""
    import hashlib

    monkeypatch.delenv("CTXGUARD_MODEL_URL", raising=False)
    servers = ("http://c/v1", "http://a/v1", "http://b/v1")
    mine = Gateway("", f"http://agl/api/rollouts/{rollout}/attempt/0/events")
    number = int.from_bytes(hashlib.sha256(rollout.encode("utf-8")).digest()[:8], "big") % 3
    assert mine.model_server(Told(servers=servers, model="m")) == ModelServer(sorted(servers)[number], "m")
    assert mine.model_server(Told()) is None
    monkeypatch.setenv("CTXGUARD_MODEL_URL", "http://near/v1")
    monkeypatch.setenv("CTXGUARD_MODEL_NAME", "Qwen/Qwen3-8B")
    expected = ModelServer("http://near/v1", "Qwen/Qwen3-8B")
    assert mine.model_server(Told(servers=servers, model="m")) == expected


@pytest.mark.parametrize(
    ("data", "reward"),
    [
        ({"value": 1}, 1.0),
        ({"value": True}, None),
        ({"value": "1"}, None),
        ({"value": None}, None),
        (None, None),
    ],
)
def test_a_reward_is_what_agent_lightning_takes_for_one(data: Any, reward: float | None) -> None:
    assert reward_in(data) == reward
