"""Each queued rollout ends exactly once, whatever arrives in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxguard.errors import ConfigurationError, FailedRolloutsError
from ctxguard.integrations.accounting import BatchAccount, Delivery, FailureHandling
from ctxguard.integrations.marks import FailureMark

BAD = FailureMark("context_overflow")
EXCLUDE, ZERO = FailureHandling.parse("exclude"), FailureHandling.parse("zero")


def account(*groups: int) -> BatchAccount:
    """``account(2, 4)``: two rollouts of group 0 (``0-0``, ``0-1``) and four of group 1."""
    return BatchAccount({f"{g}-{n}": g for g, size in enumerate(groups) for n in range(size)})


class TestDeliveries:
    def test_the_first_result_counts(self):
        book = account(2)
        assert book.deliver("0-0", None) is Delivery.TAKEN
        assert book.deliver("0-0", None) is Delivery.DUPLICATE
        assert book.missing == ("0-1",)

    def test_a_good_attempt_beats_a_failed_one_in_either_order(self):
        book = account(2)
        assert [book.deliver("0-0", BAD), book.deliver("0-0", None)] == [Delivery.TAKEN, Delivery.REPLACED]
        assert [book.deliver("0-1", None), book.deliver("0-1", BAD)] == [Delivery.TAKEN, Delivery.DUPLICATE]
        assert book.failures == {}

    def test_the_first_of_two_failures_stays(self):
        book = account(1)
        book.deliver("0-0", BAD)
        assert book.deliver("0-0", FailureMark("exception")) is Delivery.DUPLICATE
        assert book.failures == {"0-0": BAD}

    def test_another_batchs_result_is_stale(self):
        book = account(1)
        assert book.deliver("7-7", None) is Delivery.STALE
        assert book.missing == ("0-0",)

    def test_what_never_comes_ends_as_failed(self):
        book = account(3)
        book.deliver("0-1", None)
        assert book.fail_missing("waited 5 s") == ("0-0", "0-2")
        settled = book.settle(EXCLUDE, ["0-1"])
        assert settled.reasons == {"not_returned": 2}
        assert settled.failed["0-0"].detail == "waited 5 s"

    def test_an_open_account_is_not_settled(self):
        with pytest.raises(ValueError, match="1 of 1 rollouts have no result yet"):
            account(1).settle(EXCLUDE, [])


class TestSettling:
    def settle(self, failed, handling="exclude", rows=None, smallest_group=2):
        book = account(4, 2)
        ids = [*book.missing]
        for rollout in ids:
            book.deliver(rollout, BAD if rollout in failed else None)
        return book.settle(
            FailureHandling.parse(handling), ids if rows is None else rows, smallest_group=smallest_group
        )

    def test_failed_rollouts_are_left_out(self):
        settled = self.settle({"0-3"})
        assert settled.trained == dict.fromkeys(["0-0", "0-1", "0-2", "1-0", "1-1"])
        assert (settled.small_groups, settled.excluded_share) == ((), pytest.approx(1 / 6))

    def test_a_lone_survivor_is_left_out_and_still_kept(self):
        settled = self.settle({"1-0"})
        assert (settled.small_groups, settled.missing_groups) == (("1-1",), 1)
        assert "1-1" in settled.kept
        assert "1-1" not in settled.trained

    def test_a_lone_survivor_stays_where_no_group_is_needed(self):
        assert "1-1" in self.settle({"1-0"}, smallest_group=1).trained

    @pytest.mark.parametrize(("handling", "reward"), [("zero", 0.0), ("penalize(-0.5)", -0.5)])
    def test_failed_rollouts_with_rows_are_trained_on_where_that_is_asked_for(self, handling, reward):
        settled = self.settle({"0-3", "1-0"}, handling, rows=["0-0", "0-1", "0-3", "1-1"])
        assert settled.trained == {"0-0": None, "0-1": None, "0-3": reward}
        assert settled.small_groups == ("1-1",)

    def test_raise_names_the_reasons(self):
        with pytest.raises(
            FailedRolloutsError, match=r"2 of 6 rollouts failed \(context_overflow: 2\)"
        ) as caught:
            self.settle({"0-3", "1-0"}, "raise").raise_if_asked()
        assert caught.value.reasons == {"context_overflow": 2}

    @pytest.mark.parametrize("handling", ["exclude", "zero", "penalize(1)"])
    def test_the_others_do_not_raise(self, handling):
        self.settle({"0-3"}, handling).raise_if_asked()

    def test_an_empty_batch(self):
        settled = BatchAccount({}).settle(EXCLUDE, [])
        assert (settled.queued, settled.excluded_share) == (0, 0.0)


class TestHandling:
    @pytest.mark.parametrize(
        ("text", "reward"),
        [("zero", 0.0), ("penalize(-1)", -1.0), ("penalize( 0.25 )", 0.25), ("penalize(+1e-3)", 0.001)],
    )
    def test_read(self, text, reward):
        assert FailureHandling.parse(text).reward == reward

    @pytest.mark.parametrize(
        "text",
        ["", "Exclude", "penalize", "penalize()", "penalize(x)", "penalize(nan)", "penalize(1.2.3)", None, 1],
    )
    def test_anything_else_is_refused(self, text):
        with pytest.raises(ConfigurationError, match="use 'exclude', 'zero', 'penalize"):
            FailureHandling.parse(text)

    def test_a_read_one_is_taken(self):
        assert FailureHandling.parse(ZERO) is ZERO


IDS = [f"{g}-{n}" for g in range(3) for n in range(3)]


@given(
    st.lists(st.tuples(st.sampled_from([*IDS, "9-9"]), st.booleans())),
    st.sampled_from(["exclude", "zero", "penalize(-1)"]),
    st.sets(st.sampled_from(IDS)),
)
def test_whatever_arrives_each_rollout_ends_once(deliveries, handling, with_rows):
    book = account(3, 3, 3)
    for rollout, is_good in deliveries:
        book.deliver(rollout, None if is_good else BAD)
    book.fail_missing("the end")
    settled = book.settle(FailureHandling.parse(handling), with_rows)
    assert sorted([*settled.kept, *settled.failed]) == IDS
    good = {rollout for rollout, is_good in deliveries if is_good and rollout in IDS}
    assert set(settled.kept) == good
    assert set(settled.trained) <= with_rows
    assert not set(settled.trained) & set(settled.small_groups)
    if handling == "exclude":
        assert set(settled.trained) <= good
    for group in "012":
        assert sum(rollout[0] == group for rollout in settled.trained) != 1
    assert sum(book.counts.values()) == len(deliveries) + settled.reasons.get("not_returned", 0)
