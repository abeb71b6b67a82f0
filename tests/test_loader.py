"""Batches on devices, and the thread that prepares them."""

import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.data import (
    BatchPlan,
    Bucket,
    Example,
    Prefetcher,
    Step,
    build_vocabulary,
    device_batch,
    loader,
    make_rows,
    make_tokenizer,
    open_cache,
)

PADS = {"pad_source": 0, "pad_target": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """29 examples with one to three references each; two have none."""
    draw = np.random.default_rng(3)
    examples = []
    for number in range(29):
        source = "".join(draw.choice(list("abcde"), draw.integers(1, 8)))
        references = [
            " ".join(draw.choice(["P", "Q", "R"], draw.integers(1, 7)))
            for _ in range(0 if number in (0, 28) else draw.integers(1, 4))
        ]
        examples.append(Example(source, tuple(references)))
    return open_cache(
        tmp_path_factory.mktemp("cache"),
        name="toy",
        split="train",
        examples=lambda: examples,
        source_tokenizer=make_tokenizer(build_vocabulary("characters", ["abcde"])),
        target_tokenizer=make_tokenizer(build_vocabulary("symbols", ["P Q R"])),
    )


def plan_of_pairs(cache, multiple=8):
    owners = cache.example_of(np.arange(cache.num_pairs))
    return BatchPlan(
        cache.source_lengths[owners],
        cache.target_lengths,
        bucket_lengths=(4, 8),
        tokens_per_batch=64,
        multiple=multiple,
    )


def sharding(devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return NamedSharding(mesh, PartitionSpec("data"))


def by_hand(cache, step):
    """The batch row by row, in plain Python."""
    rows = []
    for item in step.items.tolist():
        if item < 0:
            source, target, weight, example = [], [], 0, -1
        else:
            example, weight = int(cache.example_of(item)), 1
            source, target = cache.source(example), cache.target(item)
        padded = [0] * step.bucket.source_length
        padded[: len(source)] = list(source)
        wanted = [1] * step.bucket.target_length
        wanted[: len(target)] = list(target)
        rows.append((padded, len(source), wanted, len(target), weight, example))
    return [np.array(column) for column in zip(*rows, strict=True)]


def test_rows_equal_those_made_by_hand(cache):
    items = np.array([5, -1, 0, 28, 13, -1, 5], np.int32)
    step = Step(Bucket(9, 11, 7), items)
    batch = make_rows(cache, step, **PADS)
    for name, found, wanted in zip(
        batch._fields, batch, by_hand(cache, step), strict=True
    ):
        np.testing.assert_array_equal(found, wanted, err_msg=name)
    assert [field.dtype for field in batch] == [np.int32] * 4 + [np.float32, np.int32]
    part = make_rows(cache, step, slice(2, 5), **PADS)
    for found, whole in zip(part, batch, strict=True):
        np.testing.assert_array_equal(found, whole[2:5])


def test_a_row_may_be_an_example_with_all_its_references(cache):
    items = np.array([5, -1, 1, 27, 13], np.int32)
    step = Step(Bucket(9, 8, 5, references=3), items)
    batch = make_rows(cache, step, **PADS)
    assert batch.target.shape == (5, 3, 8)
    # The place of END, in every reference.
    assert (batch.target[..., -1] == PADS["pad_target"]).all()
    pairs = np.arange(cache.num_pairs)
    for row, example in enumerate(items):
        mine = pairs[cache.example_of(pairs) == example]
        wanted = [cache.target(pair).tolist() for pair in mine]
        lengths = [*map(len, wanted), *[-1] * (3 - len(wanted))]
        assert batch.target_lengths[row].tolist() == lengths
        for place, symbols in enumerate(wanted):
            assert batch.target[row, place, : len(symbols)].tolist() == symbols
        if example >= 0:
            length = batch.source_lengths[row]
            source = cache.source(example)
            np.testing.assert_array_equal(batch.source[row, :length], source)
    assert batch.weight.tolist() == [1, 0, 1, 1, 1]
    assert batch.index.tolist() == items.tolist()
    for devices, rows in ((1, 5), (5, 1)):
        there = device_batch(cache, step, sharding(devices), **PADS)
        for found, whole in zip(there, batch, strict=True):
            assert found.addressable_shards[0].data.shape[0] == rows
            np.testing.assert_array_equal(np.asarray(found), whole)


def test_a_longer_item_than_its_bucket_is_refused(cache):
    longest = int(cache.target_lengths.argmax())
    fits = int(cache.target_lengths.max()) + 1
    items = np.array([longest], np.int32)
    make_rows(cache, Step(Bucket(9, fits, 1), items), **PADS)
    with pytest.raises(ValueError, match=f"item {longest} has"):
        make_rows(cache, Step(Bucket(9, fits - 1, 1), items), **PADS)


def test_global_batches_are_the_same_on_any_number_of_devices(cache):
    plan = plan_of_pairs(cache)
    for number in range(plan.steps_per_epoch):
        step = plan.step(number)
        whole = make_rows(cache, step, **PADS)
        for devices in (1, 2, 8):
            batch = device_batch(cache, step, sharding(devices), **PADS)
            for found, wanted in zip(batch, whole, strict=True):
                assert len(found.sharding.device_set) == devices
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(np.asarray(found), wanted)


def test_each_slice_of_rows_is_made_once_for_all_fields(cache, monkeypatch):
    made = []

    def counted(*arguments, **keywords):
        made.append(arguments[2])
        return make_rows(*arguments, **keywords)

    monkeypatch.setattr(loader, "make_rows", counted)
    step = plan_of_pairs(cache).step(0)
    device_batch(cache, step, sharding(4), **PADS)
    quarter = step.bucket.rows // 4
    starts = sorted(part.start for part in made)
    assert starts == [quarter * number for number in range(4)]


def test_replicated_and_doubly_cut_meshes(cache):
    """Rows are cut along one axis of the mesh and copied along the other."""
    step = plan_of_pairs(cache).step(0)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    whole = make_rows(cache, step, **PADS)
    for spec in (PartitionSpec("data"), PartitionSpec()):
        batch = device_batch(cache, step, NamedSharding(mesh, spec), **PADS)
        for found, wanted in zip(batch, whole, strict=True):
            np.testing.assert_array_equal(np.asarray(found), wanted)


def prefetch_threads():
    return [each for each in threading.enumerate() if each.name == "prefetch"]


@pytest.fixture
def no_leak():
    assert prefetch_threads() == []
    yield
    assert prefetch_threads() == []


leak_free = pytest.mark.usefixtures("no_leak")


@leak_free
def test_batches_come_in_order_and_end():
    with Prefetcher(lambda step: step * step, 3, 8, depth=2) as batches:
        assert list(batches) == [9, 16, 25, 36, 49]
        assert list(batches) == []


@leak_free
def test_no_more_than_depth_batches_wait():
    made = []
    with Prefetcher(made.append, depth=3) as batches:
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        # Three wait, and one more is in the hand of the thread.
        assert made == [0, 1, 2, 3]
        next(batches)


@leak_free
def test_an_exception_arrives_in_its_place():
    def make(step):
        if step == 2:
            raise OSError("disk gone")
        return step

    with Prefetcher(make) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="disk gone"):
            next(batches)
        assert list(batches) == []


@leak_free
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_early_close_ends_the_thread(taken):
    batches = Prefetcher(lambda step: step, depth=1)
    assert [next(batches) for _ in range(taken)] == list(range(taken))
    batches.close()
    assert list(batches) == []
    batches.close()


@leak_free
def test_close_waits_for_the_batch_in_the_making():
    began, finished = threading.Event(), threading.Event()

    def make(step):
        began.set()
        time.sleep(0.1)
        finished.set()
        return step

    with Prefetcher(make):
        began.wait(10)
    assert finished.is_set()


@leak_free
def test_close_frees_a_waiting_consumer():
    release = threading.Event()
    batches = Prefetcher(lambda step: release.wait(10))
    found = []
    consumer = threading.Thread(target=lambda: found.extend(batches))
    consumer.start()
    threading.Timer(0.1, release.set).start()
    batches.close()
    consumer.join(10)
    assert not consumer.is_alive()


@leak_free
def test_waiting_is_timed():
    with Prefetcher(lambda step: time.sleep(0.4), 0, 2) as batches:
        assert batches.wait_seconds == 0
        next(batches)
        assert batches.wait_seconds > 0.2
    ready = threading.Event()

    def quick(step):
        if step == 2:
            ready.set()
        return step

    with Prefetcher(quick, depth=2) as batches:
        ready.wait(10)
        next(batches)
        next(batches)
        assert batches.wait_seconds < 0.2


def test_a_depth_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Prefetcher(lambda step: step, depth=0)


@leak_free
def test_the_straight_run_and_the_resumed_one_feed_the_same(cache):
    plan = plan_of_pairs(cache)

    def make(number):
        return device_batch(cache, plan.step(number), sharding(8), **PADS)

    stop = plan.steps_per_epoch + 2
    with Prefetcher(make, 0, stop) as batches:
        straight = list(batches)
    with Prefetcher(make, 3, stop) as batches:
        resumed = list(batches)
    assert len(straight) == stop
    for found, wanted in zip(resumed, straight[3:], strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
