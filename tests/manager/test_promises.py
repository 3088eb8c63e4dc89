"""The promises of DESIGN.md as properties of the manager, with the real Qwen3 vocabulary and template.

The same promises through the wrapped client: tests/client/test_promises.py.
"""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ctxguard import (
    CapToolResults,
    ChatTemplateCounter,
    ContextBudget,
    ContextOverflowError,
    HistoryManager,
    default_strategies,
)
from ctxguard.compaction.base import shorten
from ctxguard.manager import call_points
from ctxguard.messages import check_messages, first_task, flatten_turns, group_turns
from tests.conversations import TOOLS, conversations

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
windows = st.integers(600, 6_000)
with_tools = st.booleans()

STRICT = """{%- set ns = namespace(last='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system must come first') }}{%- endif -%}
{%- if m.role == 'user' and ns.last == 'user' -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'tool' and ns.last not in ('call', 'tool') -%}{{ raise_exception('result without call') }}{%- endif -%}
<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n
{%- set ns.last = 'call' if m.tool_calls else m.role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"""


@pytest.fixture(scope="module")
def counter(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder)


@pytest.fixture(scope="module")
def strict_counter(qwen3_folder):
    """A template that refuses whatever the strictest templates refuse (Mistral, Gemma)."""
    return ChatTemplateCounter.from_files(qwen3_folder / "tokenizer.json", STRICT)


def manager(counter, window):
    return HistoryManager(counter, ContextBudget(window=window, max_response_tokens=window // 8))


def tools_of(use_tools):
    return TOOLS if use_tools else None


@PROPERTY
@given(conversations(), windows, with_tools)
def test_it_fits_or_raises_and_the_count_is_the_templates_own(counter, messages, window, use_tools):
    try:
        fit = manager(counter, window).fit(messages, tools_of(use_tools))
    except ContextOverflowError as error:
        facts = (error.prompt_tokens, error.limit)
        fit = None
    if fit is None:
        assert facts[0] > facts[1]
        return
    served = counter.count(fit.messages, tools=tools_of(use_tools))
    assert fit.report.tokens_after == served <= window - window // 8


@PROPERTY
@given(conversations(), windows, with_tools)
def test_it_must_fit_whenever_the_least_form_does(counter, messages, window, use_tools):
    guard = manager(counter, window)
    turns = guard.pins.mark(group_turns(messages))
    kept = [turn for turn in turns if turn.pinned or turn.newest]
    least = [
        turn if turn.pinned else turn.with_texts({s: shorten(s.text, 64, counter) for s in turn.spans})
        for turn in kept
    ]
    limit = window - window // 8
    assume(counter.count(flatten_turns(least), tools=tools_of(use_tools)) <= limit)
    guard.fit(messages, tools_of(use_tools))


@PROPERTY
@given(conversations(), windows)
def test_it_stays_valid_and_keeps_system_task_and_newest_turn(counter, messages, window):
    try:
        fit = manager(counter, window).fit(messages)
    except ContextOverflowError:
        return
    assert check_messages(fit.messages) == check_messages(messages)
    before, after = group_turns(messages), group_turns(fit.messages)
    task = first_task(before)
    assert after[: task + 1] == before[: task + 1]
    assert [m["role"] for m in after[-1].messages] == [m["role"] for m in before[-1].messages]


@PROPERTY
@given(conversations(), windows)
def test_the_strictest_templates_accept_what_they_accepted(strict_counter, messages, window):
    try:
        fit = manager(strict_counter, window).fit(messages)
    except ContextOverflowError:
        return
    strict_counter.count(messages)
    strict_counter.count(fit.messages)


@PROPERTY
@given(conversations(), windows)
def test_untouched_messages_are_identical_and_the_rest_is_accounted_for(counter, messages, window):
    try:
        fit = manager(counter, window).fit(messages)
    except ContextOverflowError:
        return
    same = sum(any(sent is message for message in messages) for sent in fit.messages)
    assert same == len(fit.messages) - fit.report.altered
    assert len(fit.messages) == len(messages) - fit.report.dropped
    order = [s.name for s in manager(counter, window).strategies]
    names = [step.name for step in fit.report.steps]
    assert set(names) <= set(order)
    if fit.report.path == "compacted":
        assert names
        assert fit.report.tokens_after < fit.report.tokens_before


@PROPERTY
@given(conversations(), windows, st.randoms(use_true_random=False))
def test_a_lost_ledger_changes_nothing_and_the_prefix_is_stable(counter, messages, window, random):
    live = manager(counter, window)
    sent = None
    for end in call_points(messages):
        history = copy.deepcopy(messages[:end])
        if random.random() < 0.3:
            live.ledger.forget()
        try:
            fit = live.fit(history)
        except ContextOverflowError:
            with pytest.raises(ContextOverflowError):
                manager(counter, window).fit(history)
            sent = None
            continue
        assert list(manager(counter, window).fit(history).messages) == list(fit.messages)
        if sent is not None and fit.report.path != "compacted":
            assert list(fit.messages[: len(sent)]) == sent
        sent = list(fit.messages)


@PROPERTY
@given(conversations(), windows)
def test_the_callers_list_is_never_touched_and_what_fits_goes_out_as_it_came(counter, messages, window):
    before = copy.deepcopy(messages)
    guard = manager(counter, window)
    high = guard.limits(guard.budget, None).high
    fits_at_all_points = all(counter.count(messages[:end]) <= high for end in call_points(messages))
    try:
        fit = guard.fit(messages)
    except ContextOverflowError:
        assert messages == before
        return
    assert messages == before
    if fits_at_all_points:
        assert fit.messages is messages
        assert fit.report.path == "untouched"


@PROPERTY
@given(conversations(), windows)
def test_the_compacted_form_is_its_own_fixpoint(counter, messages, window):
    try:
        fit = manager(counter, window).fit(messages)
        again = manager(counter, window).fit(list(fit.messages))
    except ContextOverflowError:
        return
    assert list(again.messages) == list(fit.messages)


@settings(PROPERTY, max_examples=25)
@given(conversations(), windows, st.randoms(use_true_random=False))
def test_caps_and_pins_keep_the_promises_too(counter, messages, window, random):
    def make():
        return HistoryManager(
            counter,
            ContextBudget(window=window, max_response_tokens=window // 8),
            strategies=[CapToolResults(120), *default_strategies()],
            pin_tools=["grep"],
        )

    live = make()
    for end in call_points(messages):
        history = copy.deepcopy(messages[:end])
        if random.random() < 0.3:
            live.ledger.forget()
        try:
            fit = live.fit(history, TOOLS)
        except ContextOverflowError:
            with pytest.raises(ContextOverflowError):
                make().fit(history, TOOLS)
            continue
        assert list(make().fit(history, TOOLS).messages) == list(fit.messages)
        assert counter.count(fit.messages, tools=TOOLS) == fit.report.tokens_after <= window - window // 8
        assert _calls_of("grep", fit.messages) == _calls_of("grep", history)


def _calls_of(tool, messages):
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return [call["id"] for call in calls if call["function"]["name"] == tool]
