"""The section ``ctxguard`` of the trainer's configuration."""

from __future__ import annotations

import pytest

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.agentlightning_v1.settings import GuardSettings


def test_without_a_section_failed_rollouts_are_excluded() -> None:
    settings = GuardSettings.of(None)
    assert (settings.handling.name, settings.handling.reward, settings.wait_seconds) == (
        "exclude",
        None,
        None,
    )


def test_a_handling_is_read() -> None:
    assert GuardSettings.of({"failure_handling": "penalize(-0.5)"}).handling.reward == -0.5


@pytest.mark.parametrize(
    ("estimator", "fewest"), [("grpo", 2), ("rloo", 2), ("gae", 1), ("own_estimator", 2)]
)
def test_the_smallest_group_is_what_the_estimator_calls_for(estimator: str, fewest: int) -> None:
    assert GuardSettings.of({}).smallest_group_for(estimator) == fewest
    assert GuardSettings.of({"smallest_group": 1}).smallest_group_for(estimator) == 1


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"failure_handling": "ignore"}, r"ctxguard\.failure_handling='ignore': .*'penalize\(VALUE\)'"),
        ({"wait_seconds": 0}, r"ctxguard\.wait_seconds=0: Input should be greater than 0"),
        ({"smallest_group": 3}, r"ctxguard\.smallest_group=3: Input should be less than or equal to 2"),
        (
            {"failures": "zero"},
            r"ctxguard\.failures='zero'.*\(settings: failure_handling, smallest_group, wait",
        ),
    ],
)
def test_what_is_wrong_is_named(section: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        GuardSettings.of(section)
