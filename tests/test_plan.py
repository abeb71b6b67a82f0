"""The batch plan: every item once an epoch, the same on any number of devices."""

import dataclasses
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from transformer_jax.data import BatchPlan, Bucket

SETTINGS = {"bucket_lengths": (3, 5, 8), "tokens_per_batch": 24, "multiple": 2}


def lengths(items=101, low=1, high=8, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(low, high, items), draw.integers(0, high - 1, items)


def planned(**changed):
    return BatchPlan(*lengths(), **SETTINGS | changed)


def epoch_of(plan, epoch=0):
    first = epoch * plan.steps_per_epoch
    return [plan.step(first + number) for number in range(plan.steps_per_epoch)]


@st.composite
def settings(draw):
    buckets = draw(st.lists(st.integers(2, 12), min_size=1, max_size=4, unique=True))
    longest = max(buckets)
    items = draw(
        st.lists(
            st.tuples(st.integers(1, longest), st.integers(0, longest - 1)),
            min_size=1,
            max_size=60,
        )
    )
    return items, {
        "bucket_lengths": tuple(sorted(buckets)),
        "tokens_per_batch": draw(st.integers(1, 64)),
        "multiple": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.booleans()),
    }


@hypothesis.given(settings())
@hypothesis.settings(max_examples=100)
def test_every_item_is_once_in_an_epoch_in_its_bucket(drawn):
    items, keywords = drawn
    source, target = np.array(items).T
    plan = BatchPlan(source, target, **keywords)
    for epoch in (0, 3):
        seen = []
        for bucket, members in epoch_of(plan, epoch):
            length = bucket.source_length
            assert bucket.target_length == length
            assert members.shape == (bucket.rows,)
            assert members.dtype == np.int32
            assert bucket.rows % keywords["multiple"] == 0
            small = bucket.rows == keywords["multiple"]
            assert small or bucket.rows * length <= keywords["tokens_per_batch"]
            real = members[members >= 0]
            assert len(real)
            assert (members[len(real) :] == -1).all()
            for item in real:
                fitting = min(
                    size
                    for size in keywords["bucket_lengths"]
                    if size >= source[item] and size >= target[item] + 1
                )
                assert fitting == length
            seen += real.tolist()
        assert sorted(seen) == list(range(len(items)))


def test_only_the_last_batch_of_a_bucket_is_filled_up():
    plan = planned()
    fillers: dict[Bucket, list[int]] = {}
    for bucket, items in epoch_of(plan):
        fillers.setdefault(bucket, []).append(int((items < 0).sum()))
    assert set(fillers) == set(plan.buckets)
    for bucket, counts in fillers.items():
        assert sum(count > 0 for count in counts) <= 1
        assert max(counts) < bucket.rows


def test_rows_follow_the_budget():
    rows = {bucket.source_length: bucket.rows for bucket in planned().buckets}
    assert rows == {3: 8, 5: 4, 8: 2}
    wide = planned(multiple=7).buckets
    assert [bucket.rows for bucket in wide] == [7, 7, 7]


def test_unused_buckets_are_left_out():
    plan = BatchPlan([5, 4], [1, 1], **SETTINGS)
    assert plan.buckets == (Bucket(5, 5, 4),)
    assert plan.steps_per_epoch == 1


def test_end_needs_a_place():
    assert BatchPlan([1], [2], **SETTINGS).buckets[0].target_length == 3
    assert BatchPlan([1], [3], **SETTINGS).buckets[0].target_length == 5
    assert BatchPlan([3], [0], **SETTINGS).buckets[0].target_length == 3


def test_a_run_resumes_from_one_integer():
    straight = [planned().step(number) for number in range(70)]
    for start in (0, 1, 33, planned().steps_per_epoch):
        plan = planned()
        for number in range(start, 70):
            bucket, items = plan.step(number)
            assert bucket == straight[number].bucket
            assert (items == straight[number].items).all()


def test_epochs_and_seeds_differ_in_order():
    plan = planned()
    orders = {
        tuple(np.concatenate([items for _, items in epoch_of(each, epoch)]))
        for each in (plan, planned(seed=1))
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


def test_buckets_are_mixed_within_an_epoch():
    order = [step.bucket.source_length for step in epoch_of(planned())]
    assert order != sorted(order)


def test_without_shuffling_items_keep_their_order():
    plan = planned(shuffle=False)
    seen: dict[int, list[int]] = {}
    order = []
    for bucket, items in epoch_of(plan):
        seen.setdefault(bucket.source_length, []).extend(items[items >= 0].tolist())
        order.append(bucket.source_length)
    assert order == sorted(order)
    for members in seen.values():
        assert members == sorted(members)
    again = [items.tolist() for _, items in epoch_of(plan, 5)]
    assert again == [items.tolist() for _, items in epoch_of(plan)]


def test_the_order_is_drawn_evenly():
    """Over many epochs each item's mean place is near the middle."""
    items = 16
    plan = BatchPlan(np.ones(items), np.ones(items), **SETTINGS)
    places = np.zeros(items)
    epochs = 400
    for epoch in range(epochs):
        order = np.concatenate([step.items for step in epoch_of(plan, epoch)])
        places[order] += np.arange(items)
    # Standard deviation of a mean place: sqrt((16^2 - 1) / 12 / 400) = 0.23.
    assert np.abs(places / epochs - 7.5).max() < 5 * 0.23


def test_the_padding_share_counts_places_without_a_symbol():
    source, target = lengths()
    plan = planned()
    used = places = 0
    for bucket, items in epoch_of(plan):
        places += bucket.rows * (bucket.source_length + bucket.target_length)
        for item in items[items >= 0]:
            used += source[item] + target[item] + 1
    assert plan.padding_share == pytest.approx(1 - used / places)
    assert BatchPlan([3] * 8, [2] * 8, **SETTINGS).padding_share == 0


def test_references_are_told_to_every_bucket_and_change_nothing_else():
    one, several = planned(), planned(references=3)
    assert {bucket.references for bucket in several.buckets} == {3}
    for mine, ours in zip(epoch_of(several), epoch_of(one), strict=True):
        assert mine.bucket == dataclasses.replace(ours.bucket, references=3)
        np.testing.assert_array_equal(mine.items, ours.items)


def test_items_that_fit_no_bucket_are_refused():
    source, target = [3, 9, 1, 2], [1, 1, 8, 7]
    message = r"2 of 4 items fit no bucket: the longest needs 9 places.*end at 8"
    with pytest.raises(ValueError, match=message):
        BatchPlan(source, target, **SETTINGS)


@pytest.mark.parametrize(
    ("source", "target", "changed", "message"),
    [
        ([], [], {}, "no items"),
        ([1, 2], [1], {}, r"not \(2,\) and \(1,\)"),
        ([[1]], [[1]], {}, "must be flat"),
        ([1, 0], [1, 1], {}, "item 1 has no source"),
        ([1], [-1], {}, "item 0 has no source or a negative"),
        ([1], [1], {"bucket_lengths": (3, 3)}, "must rise"),
        ([1], [1], {"bucket_lengths": ()}, "must rise"),
        ([1], [1], {"multiple": 0}, "multiple must be at least 1"),
    ],
)
def test_bad_arguments_are_named(source, target, changed, message):
    with pytest.raises(ValueError, match=message):
        BatchPlan(source, target, **SETTINGS | changed)


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="not -1"):
        planned().step(-1)


def test_threads_in_different_epochs_do_not_disturb_each_other():
    plan = planned()
    wanted = [[items.tolist() for _, items in epoch_of(planned(), e)] for e in (0, 1)]
    found: dict[int, list] = {}

    def read(epoch):
        for _ in range(5):
            found[epoch] = [items.tolist() for _, items in epoch_of(plan, epoch)]
            if found[epoch] != wanted[epoch]:
                return

    threads = [threading.Thread(target=read, args=(epoch,)) for epoch in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == wanted
