"""Where the reward of a rollout is, without Agent Lightning; tests/agl has its real spans."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ctxguard.integrations.agentlightning.rewards import reward_in
from tests.integrations.agentlightning.fakes import Tracer, activate, span, triplet

LEFT_BY_0_1 = span("task", **{"agentops.task.output": json.dumps({"type": "reward", "value": 0.25})})


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (1, 1.0),
        (True, 1.0),
        (0, 0.0),
        (None, None),
        ([], None),
        ([triplet(1.0), triplet(0.5)], 0.5),
        ([triplet(1.0), triplet(None)], None),
        (SimpleNamespace(final_reward=0.0, triplets=[triplet(1.0)]), 0.0),
        (SimpleNamespace(final_reward=None, triplets=[triplet(1.0)]), 1.0),
        (SimpleNamespace(final_reward=None, triplets=None), None),
        ([{"a": "trace"}], None),
        ([LEFT_BY_0_1], 0.25),
        ([LEFT_BY_0_1, span("other")], 0.25),
        ([span("x", **{"agentops.entity.output": "no json"})], None),
        ([span("x", **{"agentops.entity.output": "[1]"})], None),
    ],
)
def test_the_reward_is_found_as_agent_lightning_finds_it(returned, reward):
    assert reward_in(returned) == reward


def test_a_numpy_scalar_is_a_number():
    numpy = pytest.importorskip("numpy")
    reward = reward_in(numpy.float32(0.5))
    assert (reward, type(reward)) == (0.5, float)


@pytest.mark.parametrize("returned", [None, [span("other")], []])
def test_a_reward_that_was_emitted_counts_where_the_return_value_has_none(monkeypatch, returned):
    tracer = activate(monkeypatch, Tracer())
    assert reward_in(returned) is None
    tracer.spans += [LEFT_BY_0_1, span("other")]
    assert reward_in(returned) == 0.25


def test_what_is_no_number_stays_for_the_outcome_to_refuse():
    assert reward_in("good") == "good"
