"""The settings of `GuardedTrainer`, from the section ``ctxguard`` of the Hydra configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ctxguard.errors import ConfigurationError
from ctxguard.integrations.accounting import FailureHandling

_WITHOUT_GROUPS = frozenset({"gae", "reinforce_plus_plus", "remax"})
"""Advantage estimators of verl 0.8 in which a rollout's advantage does not depend on its group."""


class GuardSettings(BaseModel):
    """What the trainer does with failed rollouts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failure_handling: str = "exclude"
    """``"exclude"``: failed rollouts leave the batch. ``"zero"`` and ``"penalize(VALUE)"``: those that have
    rows (good turns before they failed) are trained on with that reward; those without cannot be.
    ``"raise"``: the run stops with `FailedRolloutsError`."""

    smallest_group: int | None = Field(default=None, ge=1, le=2)
    """Groups with fewer rollouts to train on are left out. None: 2 where the advantage estimator compares the
    rollouts of a group (GRPO gives a lone one its raw reward), 1 where it does not."""

    wait_seconds: float | None = Field(default=None, gt=0)
    """How long a rollout may run, and a queue may stand still, until a rollout ends as failed
    (``not_returned``). None: ``agentlightning.rollout_timeout_seconds``, after which the controller kills it,
    and 120 s more."""

    @field_validator("failure_handling")
    @classmethod
    def _known(cls, text: str) -> str:
        FailureHandling.parse(text)
        return text

    @property
    def handling(self) -> FailureHandling:
        """``failure_handling``, read."""
        return FailureHandling.parse(self.failure_handling)

    def smallest_group_for(self, adv_estimator: Any) -> int:
        """``smallest_group``, or what the advantage estimator calls for."""
        if self.smallest_group is not None:
            return self.smallest_group
        name = str(getattr(adv_estimator, "value", adv_estimator))
        return 1 if name in _WITHOUT_GROUPS else 2

    @classmethod
    def of(cls, section: Mapping[str, Any] | None) -> GuardSettings:
        """The settings in a configuration's section; None has none.

        Raises:
            ConfigurationError: an unknown key or a bad value.
        """
        try:
            return cls.model_validate(dict(section or {}))
        except ValidationError as error:
            complaints = "; ".join(
                f"ctxguard.{'.'.join(map(str, one['loc']))}={one['input']!r:.60}: {one['msg']}"
                for one in error.errors()
            )
            known = ", ".join(cls.model_fields)
            raise ConfigurationError(f"wrong setting: {complaints} (settings: {known})") from error
