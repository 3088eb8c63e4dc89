"""Agent Lightning's objects as far as the agent's side looks at them; the real ones are in tests/agl."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@dataclass
class LLM:
    endpoint: str
    model: str = "m"
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    resource_type: str = "llm"
    api_key: str | None = None


@dataclass
class ProxyLLM(LLM):
    resource_type: str = "proxy_llm"

    def get_base_url(self, rollout_id: str | None, attempt_id: str | None) -> str:
        root = self.endpoint.removesuffix("/v1")
        return f"{root}/rollout/{rollout_id}/attempt/{attempt_id}/v1"


def attempted(rollout_id: str = "ro-1", attempt_id: str = "at-1") -> SimpleNamespace:
    return SimpleNamespace(
        rollout_id=rollout_id, attempt=SimpleNamespace(attempt_id=attempt_id, metadata=None)
    )


def triplet(reward: float | None) -> SimpleNamespace:
    return SimpleNamespace(prompt={}, response={}, reward=reward)


def span(name: str, **attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, attributes=attributes)


class Tracer:
    """Keeps the spans that it is told to make."""

    def __init__(self) -> None:
        self.spans: list[SimpleNamespace] = []

    def create_span(self, name: str, attributes: dict[str, Any] | None = None) -> None:
        self.spans.append(SimpleNamespace(name=name, attributes=attributes or {}))

    def get_last_trace(self) -> list[SimpleNamespace]:
        return self.spans


def activate(monkeypatch: pytest.MonkeyPatch, tracer: Any) -> Any:
    """Make a tracer the active one, as within the real runner's trace."""
    module = ModuleType("agentlightning.tracer.base")
    module.get_active_tracer = lambda: tracer  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "agentlightning.tracer.base", module)
    return tracer
