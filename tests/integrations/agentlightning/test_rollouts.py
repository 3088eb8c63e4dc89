"""`mark_failures`: every rollout ends once, with a reward or marked and raised."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import OrderedDict
from types import SimpleNamespace

import pytest

from ctxguard import ConfigurationError, ContextOverflowError, current_scope
from ctxguard.errors import RolloutFailedError
from ctxguard.integrations.agentlightning import mark_failures
from ctxguard.integrations.agentlightning.marking import MAX_WAITING, stamp, waiting_marks
from ctxguard.integrations.agentlightning.rollouts import ids_in
from ctxguard.integrations.marks import METADATA_KEY, SPAN_ATTRIBUTE, SPAN_NAME, FailureMark
from tests.integrations.agentlightning.fakes import LLM, ProxyLLM, Tracer, activate, attempted, triplet
from tests.test_outcome import OVERFLOW, answered_call, failed_call

PROXIED = LLM("http://127.0.0.1:1/rollout/ro-2/attempt/at-2/v1")


@pytest.fixture(autouse=True)
def no_mark_waits(monkeypatch):
    """Each test begins with an empty process."""
    monkeypatch.setattr(waiting_marks, "_marks", OrderedDict())


@pytest.fixture
def tracer(monkeypatch):
    return activate(monkeypatch, Tracer())


def marks(tracer: Tracer) -> list[FailureMark | None]:
    """The marks in the trace."""
    return [FailureMark.from_json(s.attributes[SPAN_ATTRIBUTE]) for s in tracer.spans if s.name == SPAN_NAME]


def in_every_form(body, **options):
    """The same rollout as a function, a coroutine function, and as methods of a marked class, ready to be called."""

    @mark_failures(**options)
    def function(task, llm, rollout):
        return body()

    @mark_failures(**options)
    async def coroutine(task, llm, rollout):
        await asyncio.sleep(0)
        return body()

    @mark_failures(**options)
    class Agent:
        def rollout(self, task, resources, rollout):
            return body()

        async def training_rollout_async(self, task, resources, rollout):
            return body()

    agent = Agent()
    return [
        lambda: function("t", llm=PROXIED, rollout=attempted()),
        lambda: asyncio.run(coroutine("t", llm=PROXIED, rollout=attempted())),
        lambda: agent.rollout("t", resources={}, rollout=attempted()),
        lambda: asyncio.run(agent.training_rollout_async("t", resources={}, rollout=attempted())),
    ]


def test_a_reward_leaves_as_a_float_and_nothing_is_marked(tracer):
    def body():
        answered_call()
        return 1

    for call in in_every_form(body):
        reward = call()
        assert (reward, type(reward)) == (1.0, float)
    assert tracer.spans == []
    assert waiting_marks.take("ro-1") is None


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("no_reward", lambda: answered_call()),
        ("no_reward", lambda: answered_call() or []),
        ("no_reward", lambda: answered_call() or [triplet(1.0), triplet(None)]),
        ("invalid_reward", lambda: answered_call() or float("nan")),
        ("invalid_reward", lambda: answered_call() or {"reward": 1.0}),
        ("no_calls", lambda: 1.0),
    ],
)
def test_a_failure_without_an_error_is_marked_once_and_raised(tracer, reason, body):
    for number, call in enumerate(in_every_form(body), 1):
        with pytest.raises(RolloutFailedError) as caught:
            call()
        facts = (caught.value.reason, caught.value.rollout_id, caught.value.attempt_id)
        assert facts == (reason, "ro-1", "at-1")
        assert len(marks(tracer)) == number
        written = waiting_marks.take("ro-1", "at-1")
        assert written == marks(tracer)[-1]
        assert (written.reason, written.rollout_id, written.attempt_id) == (reason, "ro-1", "at-1")


def test_the_users_own_error_leaves_as_it_was_with_its_traceback(tracer):
    mine = KeyError("my own")

    def body():
        answered_call()
        raise mine

    for call in in_every_form(body):
        mine.__traceback__ = None
        with pytest.raises(KeyError) as caught:
            call()
        assert caught.value is mine
        assert caught.traceback[-1].name == "body"
        assert mine.__cause__ is None
    assert [mark.reason for mark in marks(tracer)] == ["exception"] * 4
    assert marks(tracer)[0].detail == "KeyError: 'my own'"
    assert marks(tracer)[0].calls["ok"] == 1


def test_an_overflow_leaves_as_itself_with_its_numbers_in_the_mark(tracer):
    for call in in_every_form(failed_call):
        with pytest.raises(ContextOverflowError) as caught:
            call()
        assert caught.value is OVERFLOW
    for mark in marks(tracer):
        assert mark.reason == "context_overflow"
        assert mark.numbers["prompt_tokens"] == 61_709


def test_a_swallowed_overflow_fails_unless_the_agent_recovered_and_may(tracer):
    def swallows():
        try:
            failed_call()
        except ContextOverflowError:
            answered_call()
        return 0.5

    for call in in_every_form(swallows):
        with pytest.raises(RolloutFailedError) as caught:
            call()
        assert caught.value.reason == "swallowed_overflow"
    assert [call() for call in in_every_form(swallows, accept_after_recovery=True)] == [0.5] * 4


def test_reward_of_hands_the_reward_alone_on_and_its_error_is_the_rollouts(tracer):
    def body():
        answered_call()
        return {"score": 2}

    assert [call() for call in in_every_form(body, reward_of=lambda result: result["score"])] == [2.0] * 4
    assert tracer.spans == []
    for call in in_every_form(body, reward_of=lambda result: result["missing"]):
        with pytest.raises(KeyError):
            call()
    assert [mark.reason for mark in marks(tracer)] == ["exception"] * 4


@pytest.mark.parametrize(
    "returned",
    [
        [triplet(None), triplet(1.0)],
        SimpleNamespace(final_reward=0.5, triplets=None),
        SimpleNamespace(final_reward=None, triplets=[triplet(1.0)]),
    ],
)
def test_triplets_and_rollout_objects_with_a_reward_leave_as_they_are(tracer, returned):
    def body():
        answered_call()
        return returned

    for call in in_every_form(body):
        assert call() is returned


def test_calls_need_not_be_guarded_where_the_user_says_so():
    assert [call() for call in in_every_form(lambda: 1.0, require_calls=False)] == [1.0] * 4


def test_signature_name_and_coroutineness_stay():
    def function(task, llm, rollout=None):
        """Doc."""

    async def coroutine(task, llm):
        pass

    marked, amarked = mark_failures(function), mark_failures(coroutine)
    assert inspect.signature(marked) == inspect.signature(function)
    assert (marked.__name__, marked.__doc__) == ("function", "Doc.")
    assert inspect.iscoroutinefunction(amarked)
    assert not inspect.iscoroutinefunction(marked)


def test_a_call_within_a_rollout_does_not_end_it(tracer):
    """0.3's ``training_rollout`` calls ``rollout``; agents call other agents."""

    @mark_failures
    class Agent:
        def training_rollout(self, task, resources, rollout):
            first = current_scope()
            assert self.rollout(task, resources, rollout) is None
            assert helper("sub-task") == "found"
            assert current_scope() is first
            return 1.0

        def rollout(self, task, resources, rollout):
            answered_call()

    @mark_failures
    def helper(task):
        return "found"

    assert Agent().training_rollout("t", {}, attempted()) == 1.0
    assert tracer.spans == []


def test_another_rollout_inside_of_one_is_its_own(tracer):
    @mark_failures
    def agent(task, rollout):
        if rollout.rollout_id == "ro-1":
            with pytest.raises(RolloutFailedError):
                agent(task, attempted("ro-9"))
            answered_call()
            return 1.0
        return 1.0

    assert agent("t", attempted()) == 1.0
    assert [(mark.rollout_id, mark.reason) for mark in marks(tracer)] == [("ro-9", "no_calls")]


def test_a_failed_rollout_leaves_the_next_one_in_the_same_thread_alone(tracer):
    @mark_failures
    def agent(task, rollout):
        answered_call()
        return task

    with pytest.raises(RolloutFailedError):
        agent(None, attempted("ro-1"))
    assert agent(1.0, attempted("ro-2")) == 1.0
    assert len(tracer.spans) == 1


def test_only_methods_that_the_user_wrote_are_wrapped():
    """Agent Lightning takes a class for asynchronous where it overrides an ``_async`` method."""

    class LitAgent:
        __module__ = "agentlightning.litagent.litagent"

        def rollout(self, task, resources, rollout): ...

        async def rollout_async(self, task, resources, rollout): ...

    class Mine(LitAgent):
        def rollout(self, task, resources, rollout):
            answered_call()
            return 1.0

    class Other(LitAgent):
        pass

    mark_failures(Mine)
    assert Mine.rollout_async is LitAgent.rollout_async
    assert Mine.rollout is not LitAgent.rollout
    assert Mine().rollout("t", {}, attempted()) == 1.0
    with pytest.raises(ConfigurationError, match="Other has no rollout method of its own"):
        mark_failures(Other)


def test_a_decorator_above_agl_rollout_is_told_off():
    agent = SimpleNamespace(training_rollout=lambda: None)
    with pytest.raises(ConfigurationError, match=r"below @agl\.rollout"):
        mark_failures(agent)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"task": "t", "llm": PROXIED, "rollout": attempted()}, ("ro-1", "at-1")),
        ({"task": "t", "llm": PROXIED}, ("ro-2", "at-2")),
        ({"task": "t", "r": {"prompt": object(), "main_llm": PROXIED}}, ("ro-2", "at-2")),
        ({"task": "t", "resources": {"llm": ProxyLLM("http://h/v1")}, "x": attempted()}, ("ro-1", "at-1")),
        ({"task": "t", "rollout_id": "ro-3", "resources": {"llm": LLM("http://h/v1")}}, ("ro-3", None)),
        ({"task": "t", "llm": PROXIED, "rollout": SimpleNamespace(rollout_id="ro-2")}, ("ro-2", "at-2")),
        ({"task": "t", "llm": PROXIED, "rollout": SimpleNamespace(rollout_id="ro-4")}, ("ro-4", None)),
        ({"task": {"resource_type": "llm"}, "llm": LLM("http://h/v1")}, (None, None)),
    ],
)
def test_ids_come_from_the_rollout_the_endpoint_or_the_id(arguments, expected):
    assert ids_in(arguments) == expected


def test_a_rollout_without_ids_gets_a_scope_all_the_same(tracer):
    @mark_failures
    def agent(task):
        answered_call()

    with pytest.raises(RolloutFailedError) as caught:
        agent("t")
    assert caught.value.rollout_id.startswith("rollout-")


def test_a_tracer_that_breaks_does_not_hide_the_failure(monkeypatch, caplog):
    class Broken(Tracer):
        def create_span(self, name, attributes=None):
            raise OSError("no store")

    activate(monkeypatch, Broken())

    @mark_failures
    def agent(task, rollout):
        raise KeyError("my own")

    with pytest.raises(KeyError):
        agent("t", attempted())
    assert "ro-1: its failure could not be marked by a span" in caplog.text
    assert waiting_marks.take("ro-1").reason == "exception"


def test_the_class_writes_the_mark_before_the_result_is_posted():
    """0.3's v0 runner calls ``on_rollout_end`` with what it is about to post."""

    class LitAgent:
        __module__ = "agentlightning.litagent.litagent"

        def on_rollout_end(self, task, rollout, runner, tracer): ...

    ended = []

    @mark_failures
    class Agent(LitAgent):
        def training_rollout(self, task, resources, rollout):
            raise KeyError("my own")

        def on_rollout_end(self, task, rollout, runner, tracer):
            ended.append(rollout)

    agent = Agent()
    posted = posted_rollout(metadata={"kept": True})
    with pytest.raises(KeyError):
        agent.training_rollout("t", {}, posted)
    agent.on_rollout_end("t", posted, None, None)
    assert ended == [posted]
    assert posted.metadata["kept"] is True
    assert FailureMark.in_metadata(posted.metadata).reason == "exception"
    json.dumps(posted.metadata)


def test_a_mark_is_written_once_and_not_into_another_attempt():
    for attempt in ("at-1", "at-2", "at-3"):
        waiting_marks.put(FailureMark("exception", rollout_id="ro-1", attempt_id=attempt))
    assert waiting_marks.take("ro-1", "at-1") is None
    assert waiting_marks.take("ro-1", "at-3") is None  # that of another attempt was thrown away
    waiting_marks.put(FailureMark("exception", rollout_id="ro-1"))
    posted = posted_rollout(metadata=None)
    stamp(posted)
    assert set(posted.metadata) == {METADATA_KEY}
    again = posted_rollout()
    stamp(again)
    assert again.metadata == {}


def test_a_function_that_is_not_told_its_rollout_is_marked_when_it_is_posted():
    """v0 mode: (task, llm), and the endpoint names no rollout."""

    @mark_failures
    def agent(task, llm):
        answered_call()

    with pytest.raises(RolloutFailedError):
        agent("t", LLM("http://h/v1"))
    good = posted_rollout(final_reward=1.0)
    stamp(good)
    assert good.metadata == {}
    posted = posted_rollout()
    stamp(posted)
    mark = FailureMark.in_metadata(posted.metadata)
    assert (mark.reason, mark.rollout_id) == ("no_reward", "ro-1")


def posted_rollout(**fields):
    """What a v0 runner posts; after an exception it has neither reward nor triplets."""
    empty = {"rollout_id": "ro-1", "metadata": {}, "final_reward": None, "triplets": None}
    return SimpleNamespace(**{**empty, **fields})


def test_marks_that_nobody_fetches_do_not_pile_up():
    for number in range(MAX_WAITING + 10):
        waiting_marks.put(FailureMark("exception", rollout_id=f"ro-{number}"))
    assert waiting_marks.take("ro-9") is None
    assert waiting_marks.take("ro-10") is not None
    for number in range(MAX_WAITING + 10):
        waiting_marks.take(f"ro-{number}")
