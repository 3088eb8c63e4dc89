"""Where the reward of a rollout is: what Agent Lightning accepts as the return value of a rollout function.

====================================  ==============================================================
returned                              reward
====================================  ==============================================================
a number                              itself
None                                  the last one that the rollout emitted (``agl.emit_reward``, 0.3)
a list of spans                       the last reward span in it, else the last one emitted
a list of triplets (v0 mode)          that of the last triplet
a rollout object (v0 mode)            its ``final_reward``, else that of its last triplet
anything else                         none: give ``reward_of``
====================================  ==============================================================

These are the rules by which Agent Lightning's own runners and daemon find it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from numbers import Real
from typing import Any

from ctxguard.integrations.agentlightning.marking import active_tracer


def reward_in(value: Any) -> Any:
    """The reward in what a rollout function returned; None where there is none."""
    if hasattr(value, "final_reward"):
        own = value.final_reward
        return own if own is not None else _of_last_triplet(getattr(value, "triplets", None))
    if isinstance(value, list):
        if value and hasattr(value[-1], "reward"):
            return _of_last_triplet(value)
        spans = [item for item in value if hasattr(item, "attributes")]
        reward = _of_last_span(spans)
        return reward if reward is not None else _emitted()
    return _emitted() if value is None else as_float(value)


def as_float(value: Any) -> Any:
    """A number as a float, NumPy's scalars too; anything else as it is."""
    return float(value) if isinstance(value, Real) else value


def _of_last_triplet(triplets: Any) -> Any:
    return getattr(triplets[-1], "reward", None) if triplets else None


def _emitted() -> Any:
    """The last reward that was emitted into the running trace. Seen are only spans of this process."""
    tracer = active_tracer()
    return _of_last_span(tracer.get_last_trace()) if tracer is not None else None


def _of_last_span(spans: Iterable[Any]) -> Any:
    rewards = (_of_span(span) for span in reversed(list(spans)))
    return next((reward for reward in rewards if reward is not None), None)


def _of_span(span: Any) -> Any:
    attributes = span.attributes or {}
    try:
        get_reward_value = import_module("agentlightning.emitter.reward").get_reward_value
    except ImportError:  # 0.1: the decorator `agl.reward` leaves this
        for key in ("agentops.task.output", "agentops.entity.output"):
            output = _as_mapping(attributes.get(key))
            if output.get("type") == "reward":
                return output.get("value")
        return None
    return get_reward_value(span)


def _as_mapping(output: Any) -> Mapping[str, Any]:
    try:
        loaded = json.loads(output) if isinstance(output, str) else output
    except ValueError:
        return {}
    return loaded if isinstance(loaded, Mapping) else {}
