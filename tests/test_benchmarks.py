"""Benchmarks: FLOPs counted exactly, fair turns, the same weights in every system."""

import contextlib
import json
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import call
from trees import named

from transformer_jax.benchmarks import (
    attention,
    cost,
    decode,
    kinds,
    peers,
    shape,
    timing,
    train,
)
from transformer_jax.benchmarks.canvas import CANVAS_SYSTEMS, CanvasDecoder
from transformer_jax.config import ConfigError
from transformer_jax.models import build_model

SMALL = {
    "width": 16,
    "heads": 2,
    "feed_forward": 24,
    "vocabulary": 29,
    "source_length": 7,
    "target_length": 9,
    "rounds": 2,
    "seconds": 0.0,
    "pause": 0.0,
}
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]


def ones(*sizes):
    return jnp.ones(sizes, jnp.float32)


def test_flops_of_a_product_are_exact():
    assert cost.matmul_flops(jnp.dot, ones(3, 5), ones(5, 7)) == 2 * 3 * 5 * 7
    einsum = jax.jit(lambda x, y: jnp.einsum("bij,bkj->bik", x, y) + 1)
    assert cost.matmul_flops(einsum, ones(2, 3, 5), ones(2, 7, 5)) == 2 * 2 * 3 * 5 * 7
    assert cost.matmul_flops(jnp.multiply, ones(3, 5), ones(3, 5)) == 0


@pytest.mark.parametrize(("wrap", "products"), [(lambda f: f, 3), (jax.checkpoint, 4)])
def test_flops_of_a_backward_pass_are_counted(wrap, products):
    """The value, a product for each operand's gradient, and what is computed again."""

    def loss(x, y):
        return wrap(lambda x, y: jnp.square(jnp.dot(x, y)).sum())(x, y)

    counted = cost.matmul_flops(jax.grad(loss, (0, 1)), ones(3, 5), ones(5, 7))
    assert counted == products * 2 * 3 * 5 * 7


def test_flops_of_a_scan_are_multiplied_by_its_length():
    def repeated(x, y):
        return jax.lax.scan(lambda x, _: (x @ y, None), x, None, length=11)[0]

    assert cost.matmul_flops(repeated, ones(3, 5), ones(5, 5)) == 11 * 2 * 3 * 5 * 5


def test_dearest_branch_counts_and_an_endless_product_is_refused():
    def branch(x):
        return jax.lax.cond(x.sum() > 0, lambda: x @ x @ x, lambda: x @ x)

    assert cost.matmul_flops(branch, ones(3, 3)) == 2 * 2 * 27

    def endless(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    with pytest.raises(ValueError, match="unknown length"):
        cost.matmul_flops(endless, ones(3, 3))


def test_flops_of_the_model_are_those_of_its_matrices():
    settings = train.Settings(depth="2-3", rows=5, **SMALL)
    batch = train.draw_batch(settings)
    config = settings.model_config(2, 3)
    params = jax.eval_shape(lambda: shape.draw_params(config, settings.symbols(), 0))
    B, S, T, D, F = 5, 7, 9, 16, 24

    def forward(params):
        return build_model(config).apply(
            {"params": params}, batch.source, batch.source_lengths, batch.target
        )

    projections = {length: 2 * B * length * D * D for length in (S, T)}
    attention = {(t, s): 2 * 2 * B * t * s * D for t, s in ((S, S), (T, T), (T, S))}
    feed_forward = {length: 2 * 2 * B * length * D * F for length in (S, T)}
    encoder = 4 * projections[S] + attention[S, S] + feed_forward[S]
    decoder = 6 * projections[T] + 2 * projections[S] + feed_forward[T]
    decoder += attention[T, T] + attention[T, S]
    logits = 2 * B * T * D * 30
    assert cost.matmul_flops(forward, params) == 2 * encoder + 3 * decoder + logits


def test_systems_take_turns_and_rest_between():
    order = []

    def job(name, number):
        return timing.Job(lambda: order.append((name, number)), lambda _: 6)

    jobs = {name: lambda number, name=name: job(name, number) for name in "abc"}
    measured = timing.interleaved(jobs, rounds=3)
    assert order == [
        (n, r) for r, names in enumerate(("abc", "cba", "abc")) for n in names
    ]
    assert {len(each.rates) for each in measured.values()} == {3}


def test_turn_repeats_until_its_time_is_full(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    jobs = {"a": lambda _: timing.Job(lambda: None, lambda _: 6)}
    measured = timing.interleaved(jobs, rounds=2, seconds=3)["a"]
    # Each call takes one tick of this clock, and gives six tokens.
    assert measured.seconds == [1] * 6
    assert measured.rates == [6, 6]


def test_summary_and_ratio():
    measured = timing.Measured([0.001 * n for n in range(1, 102)], [5.0, 1.0, 3.0])
    assert measured.summary() == {
        "calls": 101,
        "p50_ms": 51.0,
        "p95_ms": 96.0,
        "tokens_per_second": 3.0,
    }
    # Of the same rounds: 5, 1/2 and 1; the ratio of medians were 1.5.
    assert timing.ratio(measured, timing.Measured([], [1.0, 2.0, 3.0])) == 1.0


@pytest.mark.parametrize("varied", [False, True])
def test_fewer_sources_are_the_first_of_more(varied):
    settings = decode.Settings(**SMALL)
    more, fewer, other = (
        shape.draw_sources(settings, rows, number, varied=varied)
        for rows, number in ((13, 1), (5, 1), (5, 2))
    )
    np.testing.assert_array_equal(fewer.ids, more.ids[:5])
    np.testing.assert_array_equal(fewer.lengths, more.lengths[:5])
    assert (fewer.ids != other.ids).any()
    assert {*more.lengths} == ({3, 4, 5, 6, 7} if varied else {7})
    pad = settings.symbols().pad_id
    assert ((more.ids != pad).sum(1) == more.lengths).all()
    assert more.ids.min() > settings.symbols().unk_id


RESULT = {
    *("lengths", "strategy", "batch", "largest", "depth", "system", "parameters"),
    *("calls", "p50_ms", "p95_ms", "tokens_per_second", "mean_length"),
}


def test_bench_decode(monkeypatch):
    monkeypatch.setitem(peers.PACKAGES, "ctranslate2", ("no_such_package",))
    flags = [*FLAGS, "--depths=2-1", "--batches=5", "--largest=5", "--beam=2"]
    called = call("bench", "decode", *flags, "--systems=jax,ctranslate2")
    assert called.code == 0, called.err
    found = json.loads(called.out)
    (missing,) = found["missing"]
    assert "no_such_package not installed: pip install" in missing
    assert f"missing: {missing}\n" in called.err
    # One program for each strategy; fixed and natural lengths share it.
    assert found["compilations"]["count"] == 2
    cases = [(r["lengths"], r["strategy"], r["largest"]) for r in found["results"]]
    assert len({*cases}) == len(cases) == 2 * 2 * 2
    for result in found["results"]:
        assert result.keys() == RESULT
        assert result["p50_ms"] <= result["p95_ms"]
        if result["lengths"] == "fixed":
            assert result["mean_length"] == 9
        elif result["strategy"] == "greedy":
            assert 1 <= result["mean_length"] < 9
        assert result["parameters"] > 29 * 16
    assert called.err.count("fixed") == 4


def test_models_with_other_outputs_are_measured_beside():
    names = ["jax-linear", "jax-mask_predict", "jax-ctc"]
    flags = [*FLAGS, "--depths=1-1", "--batches=3", "--largest=3", "--beam=2"]
    systems = f"--systems={','.join(['jax', *names])}"
    called = call("bench", "decode", *flags, systems, "--passes=2")
    assert called.code == 0, called.err
    found = json.loads(called.out)
    # Fixed lengths alone, with one candidate and with two; ours with natural ones, too.
    counts = Counter(result["system"] for result in found["results"])
    assert counts == dict.fromkeys(names, 4) | {"jax": 8}
    for result in found["results"]:
        beside = result["system"] != "jax"
        assert ("speedup" in result) == beside
        assert "same_outputs" not in result
        if result["lengths"] == "fixed":
            assert result["mean_length"] == 9
    assert found["compilations"]["count"] == 2 * (1 + len(names))


@pytest.fixture(scope="module")
def others():
    """Settings, and an autoregressive model with its weights."""
    settings = decode.Settings(**SMALL)
    config = settings.model_config(1, 1)
    return settings, config, shape.draw_params(config, settings.symbols(), 0)


@pytest.mark.parametrize("system", CANVAS_SYSTEMS)
def test_canvas_models_have_the_weights_of_the_others(system, others):
    settings, config, params = others
    decoder = CanvasDecoder(system, config, params, settings, passes=1)
    mine, theirs = map(named, jax.device_get((decoder.params, params)))
    assert theirs.keys() <= mine.keys()
    for name, leaf in theirs.items():
        np.testing.assert_array_equal(mine[name][: len(leaf)], leaf)
    sources = shape.draw_sources(settings, 2, 0, varied=False)
    prepared = decoder.prepare(sources, 1, natural=False)
    rows = prepared.outputs(prepared.call())
    lengths = {len(row) for row in rows}
    if system == "jax-ctc":
        assert max(lengths) <= decoder.model.slots(settings.source_length) == 14
    else:
        assert lengths == {settings.target_length}


def test_bench_train(monkeypatch):
    monkeypatch.setattr(cost, "matmul_peak", lambda: 1e9)
    monkeypatch.setitem(peers.PACKAGES, "torch", ("no_such_package",))
    flags = [*FLAGS, "--depth=1-1", "--rows=3", "--systems=jax,torch"]
    called = call("bench", "train", *flags)
    assert called.code == 0, called.err
    found = json.loads(called.out)
    (missing,) = found["missing"]
    assert missing.startswith("torch: no_such_package not installed")
    (result,) = found["results"]
    assert result["system"] == "jax"
    assert result["calls"] == 2
    # The peak is 1 GFLOP/s here.
    assert result["share_of_peak"] == pytest.approx(
        result["gflops_per_second"], abs=0.01
    )
    # Weights drawn by chance know nothing: about as much as guessing.
    assert result["first_loss"] == pytest.approx(np.log(30), rel=0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ("which benchmark?", "bench decode or bench kinds")),
        (["sleep"], ("'sleep' is no benchmark",)),
        (["decode", "--systems=jax,fairseq"], ("--systems", "transformers", "fairseq")),
        (["decode", "--batches=1,few"], ("--batches takes numbers", "few")),
        (["decode", "--batches=0"], ("--batches must be at least 1, not 0",)),
        (["decode", "--batches=8,8"], ("--batches", "nothing twice")),
        (["decode", "--depths=6"], ("6-6 (encoder-decoder), not '6'",)),
        (["decode", "--benchmark=nope"], ("benchmark", "bench decode")),
        (["decode", "--beam=1"], ("--beam must be at least 2",)),
        (["decode", "--width=10", "--heads=3"], ("model.heads 3",)),
        (["train", "--dropout=1"], ("model.dropout",)),
        (["train", "--batches=1"], ("batches",)),
        (["attention", "--patterns=lokal(2)"], ("--patterns", "column 1")),
        (["attention", "--patterns=per_head((full(),))"], ("one of 1 heads",)),
        (["attention", "--heads=3", "--kv_heads=2"], ("--heads=3 is no multiple",)),
        (["train", "twice"], ("unexpected argument 'twice'",)),
    ],
)
def test_wrong_settings_are_refused_in_one_line(arguments, words):
    called = call("bench", *arguments)
    assert (called.code, called.out) == (2, ""), called.err
    assert called.err.count("\n") == 1
    for word in words:
        assert word in called.err


def test_time_limit_passes_through_what_takes_exceptions():
    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(TimeoutError, match="longer than 1 s"), peers.time_limit(1):
        stubborn()


def test_list_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="--depths must name something"):
        decode.Settings(depths=())


def test_peers_compute_what_ours_does():
    """The oracle of the whole comparison: equal outputs token by token."""
    pytest.importorskip("ctranslate2")
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    settings = decode.Settings(depths=("2-1",), batches=(5,), **SMALL)
    bench = decode.Bench(settings)
    for lengths in ("fixed", "natural"):
        wrote = {}
        for name in decode.Settings.SYSTEMS:
            case = decode.Case(lengths, 1, 5)
            decoding = bench.prepare(("2-1", name), case, 5, 0)
            wrote[name] = decoding.outputs(decoding.call())
        assert wrote["transformers"] == wrote["jax"]
        assert wrote["ctranslate2"] == wrote["jax"]
        natural = lengths == "natural"
        assert (min(map(len, wrote["jax"])) < 9) == natural


def test_peers_train_as_ours_does():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    settings = train.Settings(
        depth="1-2", rows=3, dropout=0.0, systems=("jax", "torch"), **SMALL
    )
    bench = train.Bench(settings)
    losses = {
        name: [update() for _ in range(3)] for name, update in bench.calls.items()
    }
    np.testing.assert_allclose(losses["torch"], losses["jax"], rtol=1e-4)
    assert losses["jax"][0] > losses["jax"][-1]


TWO = ("causal() & local(3)", "per_head((local(3), strided(4), local(3), local(2)))")
TINY_ATTENTION = {
    "patterns": ";".join(TWO),
    "lengths": (40,),
    "heads": 4,
    "kv_heads": 2,
    "width": 16,
    "block": 8,
    "rounds": 2,
    "seconds": 0.0,
    "pause": 0.0,
}


def test_attention_is_measured_beside_what_computes_the_same():
    systems = ("jax", "jax-dense", "jax-nn")
    found = attention.run(attention.Settings(systems=systems, **TINY_ATTENTION))
    rows = found["results"]
    names = [(row["pattern"], row["pass"], row["system"]) for row in rows]
    assert names == [
        (pattern, each, system)
        for pattern in TWO
        for each in ("forward", "backward")
        for system in systems
    ]
    for row in rows:
        assert row["error"] < 1e-5
        assert row["gflop"] > 0
        assert row["calls"] == TINY_ATTENTION["rounds"]
        # A mean of rates is never below the rate at the mean time (to three digits).
        assert row["tokens_per_second"] * row["p50_ms"] / 1e3 > 0.98 * 40
    assert attention.Settings(heads=3).kv_heads == 3


def test_dense_systems_that_would_not_fit_are_left_out(capsys):
    settings = attention.Settings(
        systems=("jax", "jax-dense"), gigabytes=1e-5, **TINY_ATTENTION
    )
    assert {row["system"] for row in attention.run(settings)["results"]} == {"jax"}
    assert "missing: jax-dense: would need" in capsys.readouterr().err


def test_kinds_are_measured_at_every_length(capsys):
    settings = {"lengths": (40,), "heads": 2, "width": 8, "passes": ("backward",)}
    times = {"rounds": 2, "seconds": 0.0, "pause": 0.0}
    texts = "full(); linear(); linformer(rank=4); routing(clusters=3); local(2)"
    found = kinds.run(kinds.Settings(kinds=texts, causal=1, **settings, **times))
    rows = {row["kind"]: row for row in found["results"]}
    # What knows no causality is left out.
    assert [*rows] == ["full()", "linear()", "routing(clusters=3)", "local(2)"]
    assert all(row["gflop"] > 0 and row["p50_ms"] > 0 for row in rows.values())
    few = kinds.Settings(kinds="full()", gigabytes=1e-6, **settings, **times)
    assert kinds.run(few)["results"] == []
    assert "missing: full() at 40 positions: would need" in capsys.readouterr().err
    for wrong in ("linear(rank=3)", "local(x)"):
        with pytest.raises(ConfigError, match="--kinds"):
            kinds.Settings(kinds=wrong)
    with pytest.raises(ConfigError, match="no kind that knows causality"):
        kinds.Settings(kinds="linformer()", causal=1)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_attention_of_pytorch_is_the_same():
    pytest.importorskip("torch")
    systems = ("jax", "torch-sdpa", "torch-flex")
    found = attention.run(attention.Settings(systems=systems, **TINY_ATTENTION))
    # On a CPU FlexAttention has no backward pass.
    assert len(found["results"]) == 10
    assert max(row["error"] for row in found["results"]) < 1e-5
