"""Kernels of others behind our contract: splash for TPUs, cuDNN for NVIDIA GPUs."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import RNG, normal

from transformer_jax.attention import (
    assume_platform,
    cudnn,
    dot_product_attention,
    splash,
)
from transformer_jax.patterns import causal, full, local, parse, per_head

B, N, K, H, V = 2, 4, 2, 24, 40
SEGMENTS = [[1] * 70 + [2] * 60 + [0] * 20, [3] * 150]


def drawn(rows, columns, width=V):
    """Query, key, value and the output's cotangent."""
    shapes = ((rows, N, H), (columns, K, H), (columns, K, width), (rows, N, width))
    return [normal(B, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def allowed_edges(rows, columns, call):
    """`[B, T, S]`, of the arguments that these kernels take."""
    pattern = call.get("pattern", full()) & (
        causal() if "is_causal" in call else full()
    )
    edges = pattern.dense(rows, columns, query_offset=call.get("query_offset", 0))
    t, j = np.arange(rows)[None, :, None], np.arange(columns)[None, None]
    ends = call.get("query_seq_lengths"), call.get("key_value_seq_lengths")
    for places, end in zip((t, j), ends, strict=True):
        if end is not None:
            edges = edges & (places < np.asarray(end)[:, None, None])
    if "query_segment_ids" in call:
        ids = np.asarray(call["query_segment_ids"])
        same = (ids[:, :, None] == ids[:, None]) & (ids != 0)[:, None]
        edges = edges & same
    return np.broadcast_to(edges, (B, rows, columns))


def assert_equals_reference(implementation, arrays, **call):
    """Forward and backward, with NaN in keys and queries that nothing reads."""
    query, key, value, cotangent = arrays
    edges = allowed_edges(query.shape[1], key.shape[1], call)
    dead = ~edges.any(2), ~edges.any(1)
    query = jnp.where(dead[0][..., None, None], jnp.nan, query)
    key, value = (jnp.where(dead[1][..., None, None], jnp.nan, x) for x in (key, value))

    def both(implementation, *arrays):
        attend = functools.partial(
            dot_product_attention, implementation=implementation, **call
        )
        output, pullback = jax.vjp(attend, *arrays)
        return output, *pullback(cotangent)

    got, wanted = (
        jax.jit(functools.partial(both, name))(query, key, value)
        for name in (implementation, "reference")
    )
    names = ("output", "query", "key", "value")
    for name, mine, ours in zip(names, got, wanted, strict=True):
        np.testing.assert_allclose(mine, ours, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("text", "sizes", "call"),
    [
        (
            "causal() & (local(60) | global_tokens(3))",
            (150, 150),
            {
                "query_segment_ids": jnp.array(SEGMENTS),
                "key_value_segment_ids": None,
            },
        ),
        (
            "local(9, 30) & ~causal()",
            (130, 200),
            {
                "key_value_seq_lengths": jnp.array([0, 160]),
                "query_seq_lengths": jnp.array([130, 99]),
                "query_offset": 70,
            },
        ),
    ],
)
def test_splash_keeps_the_contract(text, sizes, call, monkeypatch):
    monkeypatch.setattr(splash, "INTERPRET", True)
    splash._kernel.cache_clear()
    arrays = drawn(*sizes)
    if "query_segment_ids" in call:
        call = {**call, "key_value_segment_ids": call["query_segment_ids"]}
    assert_equals_reference("splash", arrays, pattern=parse(text), scale=0.3, **call)
    splash._kernel.cache_clear()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"dropout_rate": 0.1, "dropout_rng": RNG}, "has no dropout"),
        ({"bias": normal(N, 9, 9)}, "has no bias"),
        ({"mask": jnp.ones((9, 9), bool)}, "takes no mask"),
        ({"pattern": per_head((causal(),) * N)}, "one pattern for all heads"),
        ({"pattern": parse("strided(3)")}, r"the pattern strided\(3\) in the kernel"),
        ({"return_residual": True}, "tells no log-sum-exp"),
        (
            {
                "query_segment_ids": jnp.ones((B, 9), int),
                "key_value_segment_ids": jnp.ones((B, 9), int),
            },
            "the same ids twice",
        ),
    ],
)
def test_what_splash_cannot_do_names_the_alternative(call, words, monkeypatch):
    monkeypatch.setattr(splash, "INTERPRET", True)
    call = {"pattern": local(2), **call, "implementation": "splash"}
    with pytest.raises(NotImplementedError, match=f"{words}.*use.*'xla'"):
        jax.eval_shape(
            functools.partial(dot_product_attention, **call), *drawn(9, 9)[:3]
        )


def test_splash_is_chosen_on_a_tpu_alone(monkeypatch):
    chosen = []
    monkeypatch.setitem(
        sys.modules[dot_product_attention.__module__].IMPLEMENTATIONS,
        "splash",
        lambda call: (chosen.append(call.pattern), (call.query * 1.0, None))[1],
    )
    arrays = drawn(200, 200, H)[:3]
    attend = functools.partial(dot_product_attention, arrays[0], arrays[0], arrays[0])
    attend(pattern=local(5))
    with assume_platform("tpu"):
        attend(pattern=local(6))
        attend(pattern=parse("strided(7)"))
        attend(pattern=local(8), return_residual=True)
    assert chosen == [local(6)]


@pytest.mark.parametrize(
    "call",
    [
        {"pattern": local(3, 1), "key_value_seq_lengths": jnp.array([5, 0])},
        {"pattern": causal() & local(2)},
        {"is_causal": True, "query_seq_lengths": jnp.array([3, 9])},
    ],
)
def test_cudnn_keeps_the_contract(call, monkeypatch):
    """What stands around the call of `jax.nn`; here its other backend answers."""
    monkeypatch.setattr(cudnn, "BACKEND", "xla")
    assert_equals_reference("cudnn", drawn(9, 9, H), **call)


def test_what_cudnn_cannot_do_names_the_alternative():
    arrays = drawn(9, 9, H)[:3]
    with pytest.raises(NotImplementedError, match="values as wide as keys"):
        dot_product_attention(*drawn(9, 9)[:3], implementation="cudnn")
    for call, words in (
        ({"pattern": parse("strided(3)")}, r"full, causal and local, not strided\(3\)"),
        ({"query_offset": 1}, "has no query_offset"),
        ({"mask": jnp.ones((9, 9), bool)}, "takes no bias, mask or segments"),
        ({}, "runs on GPUs only"),
    ):
        with pytest.raises(NotImplementedError, match=f"{words}.*use.*'xla'"):
            dot_product_attention(*arrays, implementation="cudnn", **call)


# --- The real compiler -----------------------------------------------------------


@pytest.fixture(scope="module")
def chip():
    """A TPU v5e of libtpu's compiler; no TPU is needed."""
    folder = Path(__file__).parents[2] / ".venv" / "tpu"
    sys.path.append(str(folder))
    if importlib.util.find_spec("libtpu") is None:
        sys.path.remove(str(folder))
        pytest.skip("libtpu is not installed: bash tests/run.sh --slow installs it")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    described = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    yield jax.sharding.SingleDeviceSharding(described.devices[0])
    sys.path.remove(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("causal()", 16384),
        ("causal() & local(128)", 16384),
        ("local(128) | global_tokens(4)", 16384),
        ("causal()", 131072),
        ("causal() & local(1024)", 131072),
    ],
)
def test_patterns_compile_for_a_tpu(chip, text, length, capsys):
    """By splash, which is chosen; temporary bytes are printed."""
    heads, width = 8, 64
    shape = (1, length, heads, width)
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=chip)

    def both(*arrays):
        attend = functools.partial(dot_product_attention, pattern=parse(text))
        output, pullback = jax.vjp(attend, *arrays[:3])
        return output, *pullback(arrays[3])

    with assume_platform("tpu"):
        compiled = jax.jit(both).lower(*(array,) * 4).compile()
    assert "tpu_custom_call" in compiled.as_text()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Forward and backward, float32 sums of gradients included: no scores.
    assert temporary < 40 * length * heads * 128
    with capsys.disabled():
        print(f"\n{text} at {length}: {temporary / 1e6:.0f} MB of temporary memory")
