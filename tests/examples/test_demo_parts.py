"""The parts of the demo that need no server."""

from __future__ import annotations

import pytest

from ctxguard.messages import check_messages, group_turns
from examples.demo.agent import Agent
from examples.demo.forms import turn
from examples.demo.rollouts import Row
from examples.demo.tasks import make_tasks
from examples.demo.tools import TOOLS, SourceTree, ToolCall
from examples.demo.verdict import Verdict

TREE = SourceTree.of_standard_library()


def tasks(seed=0):
    return make_tasks(TREE, rollouts=8, window=20_480, seed=seed)


def test_tools_list_read_and_search_real_files():
    assert "json/decoder.py: " in TREE.list_files("json")
    hits = TREE.search("class JSONDecoder", "json")
    path, line, _ = hits.splitlines()[0].split(":", 2)
    read = TREE.run(ToolCall("read_file", {"path": path, "first_line": int(line), "lines": 3}))
    assert read.splitlines()[0].split(maxsplit=1)[1].startswith("class JSONDecoder")
    assert len(read.splitlines()) == 3


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            ToolCall("read_file", {"path": "../../etc/passwd"}),
            "error: ../../etc/passwd is not in the source tree",
        ),
        (ToolCall("read_file", {"path": "json/no.py"}), "error: [Errno 2]"),
        (ToolCall("read_file", {"file": "json/decoder.py"}), "error: "),
        (ToolCall("write_file", {}), "error: there is no tool write_file"),
        (ToolCall("search", {"text": "no such text anywhere", "folder": "json"}), "nothing found"),
    ],
)
def test_a_wrong_call_is_answered_not_raised(call, answer):
    assert TREE.run(call).startswith(answer)


def test_the_schemas_name_every_tool():
    names = [tool["function"]["name"] for tool in TOOLS]
    assert names == ["list_files", "read_file", "search"]


def test_tasks_depend_on_nothing_but_the_seed():
    assert tasks() == tasks()
    assert tasks(1)[0].names != tasks()[0].names
    assert [task.fits for task in tasks()] == [True] * 8 + [False]


@pytest.mark.parametrize("index", range(9))
def test_every_script_ends_with_a_reward_and_a_valid_history(index):
    task = tasks()[index]
    agent = Agent(None, "m", TREE, task, lambda agent, tokens: None)
    script = task.script()
    calls, steps = next(script), 0
    while True:
        results = [TREE.run(call) for call in calls]
        steps += 1
        agent.history += turn(task.form, steps, calls, results)
        try:
            calls = script.send(results)
        except StopIteration as end:
            reward = end.value
            break
    assert reward > 0.8 if task.fits else reward == 0
    assert steps + 1 == task.expected_calls
    assert check_messages(agent.request["messages"]) is None
    assert sum(turn.kind == "assistant" for turn in group_turns(agent.history)) == steps


def row(**facts):
    return Row(**{"task": "1 a", "form": "native", "fits": True, "calls": 2, "differences": [0, 0],
                  "status": "succeeded", "reward": 1.0, "outcome": "reward 1.00", **facts})  # fmt: skip


FAILED = {"status": "failed", "reason": "context_overflow", "outcome": "failed", "reward": None}


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, None),
        ({"differences": [0, 3]}, "1 a: predicted and served differ on 1 calls, e.g. by 3"),
        ({"differences": [0]}, "1 a: 2 calls, but 1 answers"),
        ({"status": "no result"}, "1 a: the guarded rollout has no outcome"),
        (FAILED, "1 a: failed"),
        ({**FAILED, "fits": False}, None),
        ({**FAILED, "fits": False, "reason": "exception"}, "1 a: cannot fit, but ended as: failed"),
        ({"fits": False}, "1 a: cannot fit, but ended as: reward 1.00"),
    ],
)
def test_the_verdict_names_what_must_not_happen(facts, problem):
    assert Verdict(20_480, [], [row(**facts)]).problems == ([] if problem is None else [problem])
