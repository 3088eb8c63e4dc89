"""Three batches of 64 rollouts that overflow, crash, hang, come twice and come late: each ends exactly once.

Agent Lightning's server is the real one, the trainer the guarded one up to the actor's update; the agents are played
by a seeded fate.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ctxguard.integrations.marks import FailureMark
from tests.agl1.players import Players
from tests.agl1_trainer.bench import Guarded, N, config_for, fates

BATCHES, TASKS = 3, 16
CALL = [[[1, 2], [3]]]
MARK = FailureMark("context_overflow", numbers={"prompt_tokens": 61709, "limit": 20480}).to_dict()
FATES: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "good": (10, {"calls": CALL, "reward": 1.0}, None),
    "twice": (2, {"calls": CALL, "reward": 0.0, "twice": True}, None),
    "overflow": (3, {"calls": CALL, "refused": True, "mark": MARK, "end": "failed"}, "context_overflow"),
    "swallowed": (1, {"calls": CALL, "refused": True}, "swallowed_overflow"),
    "crash": (2, {"calls": CALL, "end": "failed"}, "unmarked"),
    "hang": (1, {"calls": CALL, "end": "hang"}, "not_returned"),
    "never": (1, {"end": "never"}, "not_returned"),
    "late": (1, {"calls": CALL, "reward": 1.0, "end": "hang", "late_seconds": 5}, "not_returned"),
}
"""Name → weight, what is played, and the reason that the rollout fails for, None for one that is kept."""


def test_each_rollout_ends_exactly_once(players: Players) -> None:
    draw = random.Random(64)
    weights = [weight for weight, _, _ in FATES.values()]
    drawn = [[draw.choices(list(FATES), weights, k=N) for _ in range(TASKS)] for _ in range(BATCHES)]
    batches = [[fates(*(FATES[name][1] for name in task)) for task in batch] for batch in drawn]
    assert {name for batch in drawn for task in batch for name in task} == set(FATES)
    refused = players.refused.copy()

    trainer = Guarded(config_for(players.server, **{"ctxguard.wait_seconds": 2.5}), batches)
    for batch in drawn:
        metrics = trainer.step()
        expected = Counter(FATES[name][2] for task in batch for name in task)
        kept = expected.pop(None)
        failed = {name: value for name, value in metrics.items() if name.startswith("ctxguard/failed/")}
        assert failed == {f"ctxguard/failed/{reason}": count for reason, count in expected.items()}
        assert metrics["ctxguard/kept"] == kept
        assert (
            metrics["ctxguard/kept"] + metrics["ctxguard/failed"] == metrics["ctxguard/queued"] == TASKS * N
        )
        assert metrics["ctxguard/stale"] == metrics["ctxguard/duplicate"] == 0, (
            "1.0's server takes no second end"
        )
        alone = sum(kept_of(task) == 1 for task in batch)
        assert metrics["ctxguard/small_group_rollouts"] == alone
        assert metrics["ctxguard/trained_rollouts"] == kept - alone
    assert trainer._open_rollouts == {}
    assert len(trainer.trained) == BATCHES
    twice = sum(name == "twice" for batch in drawn for task in batch for name in task)
    assert (players.refused - refused)[409] + (players.refused - refused)[404] >= twice


def kept_of(task: list[str]) -> int:
    return sum(FATES[name][2] is None for name in task)
