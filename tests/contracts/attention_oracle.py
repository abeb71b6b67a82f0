"""The oracle of the attention contract, the cases, and calls to the kernels.

The oracle is written with loops over single queries in NumPy float64. It reads allowed
edges only, so whatever no query may attend can hold NaN, and it does in every case.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pattern_oracle import allows

from transformer_jax import attention, masks
from transformer_jax.patterns import parse

B, T, S, N, K, H, V = 2, 5, 7, 6, 3, 11, 13


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["slopes", "unit"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Slopes:
    """A bias as a callable: -slope |i - j|, one slope a head (Press et al. 2022).

    The unit of distances is an integer, which has no gradient.
    """

    slopes: Any
    unit: Any = dataclasses.field(default_factory=lambda: jnp.ones((), jnp.int32))

    def __call__(self, i, j):
        distance = (self.unit * jnp.abs(i - j)).astype(self.slopes.dtype)
        return -self.slopes[:, None, None] * distance[None]


class Case(NamedTuple):
    """One call: its arguments, and what differs from the sizes above."""

    arguments: dict[str, Any]
    bias: tuple[int, ...] | str | None = None
    heads: tuple[int, int] = (N, K)
    lengths: tuple[int, int] = (T, S)


def random_mask(*shape: int) -> np.ndarray:
    """Two thirds are True; the second query is dead, the third key unattended.

    Where heads differ, the fifth key is unattended by the heads of key/value head 0.
    """
    mask = np.random.default_rng(5).random(shape) < 0.67
    mask[..., 1, :] = False
    mask[..., 2] = False
    if len(shape) > 2 and shape[-3] == N:
        mask[..., : N // K, :, 4] = False
    return mask


# Each head reaches one further.
WIDER = f"per_head(({', '.join(f'local({n})' for n in range(N))}))"

LENGTHS = {"query_seq_lengths": [4, 0], "key_value_seq_lengths": [3, 7]}
SEGMENTS = {
    "query_segment_ids": [[1, 1, 2, 0, 3], [4, 4, 4, 5, 5]],
    "key_value_segment_ids": [[1, 1, 2, 2, 0, 0, 9], [5, 0, 0, 0, 4, 4, 6]],
}
CASES = {
    "plain": Case({}),
    "causal, more queries": Case({"is_causal": True}, lengths=(7, 5)),
    "causal with offset": Case({"is_causal": True, "query_offset": 2}, "slopes"),
    "lengths, a head for each": Case(LENGTHS, heads=(3, 3)),
    "no keys": Case({"key_value_seq_lengths": [0, 5]}, (B, 1, 1, S)),
    "segments, one head for all": Case(SEGMENTS, heads=(3, 1)),
    "mask of keys": Case({"mask": np.arange(B * S).reshape(B, 1, 1, S) % 3 == 0}),
    "mask of heads": Case({"mask": random_mask(N, T, S)}, (T, 1)),
    "mask of everything": Case({"mask": random_mask(B, N, T, S)}, (B, N, T, S)),
    "nothing allowed": Case({"mask": np.zeros((1, 1), bool)}),
    "pattern of heads": Case({"pattern": WIDER, "is_causal": True}, "slopes"),
    "dropout": Case({"dropout_rate": 0.4, "query_offset": 3}),
    "all at once": Case(
        {
            "pattern": "local(3)",
            "is_causal": True,
            "query_offset": 1,
            "scale": 0.5,
            "mask": random_mask(B, 1, T, S),
            "dropout_rate": 0.2,
            "query_seq_lengths": [5, 4],
            "key_value_seq_lengths": [7, 2],
            "query_segment_ids": [[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]],
            "key_value_segment_ids": [[1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0]],
        },
        (N, 1, S),
    ),
}
RNG = jax.random.key(3)


def allowed_edges(case: Case) -> np.ndarray:
    """`[B, N, T, S]`, edge by edge from the words of the contract."""
    call = case.arguments
    (heads, _), (rows, columns) = case.heads, case.lengths
    shape = (B, heads, rows, columns)
    mask = np.broadcast_to(call.get("mask", True), shape)
    offset = call.get("query_offset", 0)
    heads_of = _patterns_of_heads(call.get("pattern", "full()"), heads)
    allowed = np.zeros(shape, bool)
    for b, n, t, j in np.ndindex(shape):
        i = t + offset
        checks = [mask[b, n, t, j], j <= i or not call.get("is_causal")]
        if "query_seq_lengths" in call:
            checks.append(t < call["query_seq_lengths"][b])
        if "key_value_seq_lengths" in call:
            checks.append(j < call["key_value_seq_lengths"][b])
        if "query_segment_ids" in call:
            segment = call["query_segment_ids"][b][t]
            checks.append(0 != segment == call["key_value_segment_ids"][b][j])
        checks.append(allows(heads_of[n], i, j))
        allowed[b, n, t, j] = all(checks)
    return allowed


def _patterns_of_heads(text: str, heads: int) -> list[str]:
    """The text of each head's pattern."""
    if text == WIDER:
        return [f"local({n})" for n in range(heads)]
    return [text] * heads


def oracle(inputs: dict, allowed: np.ndarray, scale: float, kept: np.ndarray) -> dict:
    """Forward and backward, one query at a time; `kept` is 0 or 1 / (1 - rate)."""
    query, key, value, bias, out_cotangent, residual_cotangent = (
        np.asarray(x, np.float64) for x in inputs.values()
    )
    group = query.shape[2] // key.shape[2]
    output = np.zeros(out_cotangent.shape)
    residual = np.full(residual_cotangent.shape, -np.inf)
    grads = {n: np.zeros(inputs[n].shape) for n in ("query", "key", "value", "bias")}
    for b, n, t in itertools.product(*map(range, allowed.shape[:3])):
        j, k = np.flatnonzero(allowed[b, n, t]), n // group
        if not j.size:
            continue
        q, keys, values = query[b, t, n], key[b, j, k], value[b, j, k]
        scores = scale * keys @ q + bias[b, n, t, j]
        residual[b, t, n] = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        weights = np.exp(scores - residual[b, t, n])
        keep = kept[b, n, t, j]
        output[b, t, n] = (weights * keep) @ values
        up = keep * (values @ out_cotangent[b, t, n])
        down = weights * (up - weights @ up + residual_cotangent[b, t, n])
        grads["query"][b, t, n] += scale * down @ keys
        grads["key"][b, j, k] += scale * down[:, None] * q
        grads["value"][b, j, k] += (weights * keep)[:, None] * out_cotangent[b, t, n]
        grads["bias"][b, n, t, j] += down
    return {"output": output, "residual": residual, **grads}


def draw(case: Case, dtype: Any, allowed: np.ndarray) -> dict[str, np.ndarray]:
    """Normal inputs and cotangents, NaN wherever nothing may be read."""
    rng = np.random.default_rng(7)
    (heads, kv_heads), (rows, columns) = case.heads, case.lengths
    shapes = {
        "query": (B, rows, heads, H),
        "key": (B, columns, kv_heads, H),
        "value": (B, columns, kv_heads, V),
        "output": (B, rows, heads, V),
        "residual": (B, rows, heads),
    }
    arrays = {
        name: np.array(jnp.asarray(rng.normal(size=shape), dtype))
        for name, shape in shapes.items()
    }
    dead_rows = ~allowed.any(3).transpose(0, 2, 1)
    by_group = allowed.reshape(B, kv_heads, -1, columns)
    dead_columns = ~by_group.any(2).transpose(0, 2, 1)
    for name in ("query", "output", "residual"):
        arrays[name][dead_rows] = np.nan
    for name in ("key", "value"):
        arrays[name][dead_columns] = np.nan
    return arrays


def draw_bias(case: Case, dtype: Any) -> Any:
    """The bias as the kernel takes it: None, an array, or a callable."""
    rng = np.random.default_rng(11)
    if case.bias is None:
        return None
    if case.bias == "slopes":
        return Slopes(jnp.asarray(rng.normal(size=case.heads[0]), dtype))
    return jnp.asarray(rng.normal(size=case.bias), dtype)


def spread_bias(bias: Any, case: Case, shape: tuple) -> np.ndarray:
    """The bias as the oracle takes it, `[B, N, T, S]`."""
    if bias is None:
        return np.zeros(shape)
    if isinstance(bias, Slopes):
        slopes = np.asarray(bias.slopes, np.float64)
        return np.broadcast_to(-slopes[:, None, None] * distances(case), shape)
    return np.broadcast_to(np.asarray(bias, np.float64), shape)


def distances(case: Case) -> np.ndarray:
    i = np.arange(case.lengths[0])[:, None] + case.arguments.get("query_offset", 0)
    return np.abs(i - np.arange(case.lengths[1])[None, :])


def gather_bias_gradient(full: np.ndarray, bias: Any, case: Case) -> np.ndarray | None:
    """From the gradient at `[B, N, T, S]` to that of what the kernel was given."""
    if bias is None:
        return None
    if isinstance(bias, Slopes):
        return -(full * distances(case)).sum((0, 2, 3))
    shape = (1,) * (4 - bias.ndim) + bias.shape
    axes = tuple(axis for axis in range(4) if shape[axis] == 1)
    return full.sum(axes, keepdims=True).reshape(bias.shape)


# Ways to compute one kernel; "xla" cuts these small calls into several tiles.
WAYS = {
    "": {},
    "reference": {"implementation": "reference"},
    "xla": {"implementation": "xla", "block_size": 3},
}


def kernel_of(name: str) -> Any:
    """The kernel of a row of the table; "row/xla" chooses a way to compute it."""
    row, _, way = name.partition("/")
    return functools.partial(attention.ATTENTION[row].kernel, **WAYS[way])


def compute(name: str, case: Case, inputs: dict, bias: Any) -> dict[str, Any]:
    """The kernel's outputs and gradients by name, pulled back from the cotangents."""
    call = {
        word: jnp.asarray(value) if isinstance(value, list | np.ndarray) else value
        for word, value in case.arguments.items()
    }
    if "dropout_rate" in call:
        call["dropout_rng"] = RNG
    if "pattern" in call:
        call["pattern"] = parse(call["pattern"])
    kernel = functools.partial(kernel_of(name), return_residual=True, **call)
    primals = {word: jnp.asarray(inputs[word]) for word in ("query", "key", "value")}

    @jax.jit
    def run(primals, bias, cotangents):
        (output, residual), pullback = jax.vjp(
            lambda primals, bias: kernel(**primals, bias=bias), primals, bias
        )
        cotangents = (
            cotangents[0].astype(output.dtype),
            cotangents[1].astype(residual.dtype),
        )
        return output, residual, *pullback(cotangents)

    cotangents = (jnp.asarray(inputs["output"]), jnp.asarray(inputs["residual"]))
    output, residual, grads, bias_grad = run(primals, bias, cotangents)
    if isinstance(bias, Slopes):
        bias_grad = bias_grad.slopes
    return {"output": output, "residual": residual, **grads, "bias": bias_grad}


def expect(case: Case, inputs: dict, bias: Any, allowed: np.ndarray) -> dict[str, Any]:
    """What the oracle says about the same call."""
    kept = np.ones(allowed.shape)
    if rate := case.arguments.get("dropout_rate"):
        b, n, t, j = np.indices(allowed.shape, np.int32)
        i = t + np.int32(case.arguments.get("query_offset", 0))
        kept = np.asarray(masks.hashed_keep(RNG, rate, b, n, i, j)) / (1 - rate)
    operands = {word: inputs[word] for word in ("query", "key", "value")}
    operands["bias"] = spread_bias(bias, case, allowed.shape)
    cotangents = {"output": inputs["output"], "residual": inputs["residual"]}
    scale = case.arguments.get("scale", H**-0.5)
    wanted = oracle(operands | cotangents, allowed, scale, kept)
    wanted["bias"] = gather_bias_gradient(wanted["bias"], bias, case)
    return wanted


def assert_close(got: Any, wanted: np.ndarray, tolerance: float, name: str) -> None:
    """Within tolerance * max(1, max |wanted|); equal where `wanted` is infinite."""
    finite = np.abs(wanted[np.isfinite(wanted)])
    limit = tolerance * max(1, finite.max(initial=0))
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=limit, err_msg=name)


def check_case(
    name: str, case: Case, dtype: Any, forward: float, backward: float
) -> dict[str, Any]:
    """Compare a call with the oracle, output by output and gradient by gradient."""
    allowed = allowed_edges(case)
    inputs, bias = draw(case, dtype, allowed), draw_bias(case, dtype)
    got = compute(name, case, inputs, bias)
    for word, wanted in expect(case, inputs, bias, allowed).items():
        if wanted is not None:
            tolerance = forward if word in ("output", "residual") else backward
            assert_close(got[word], wanted, tolerance, word)
    return got


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def operands(batch: int = B, length: int = T, heads: int = N) -> list[jax.Array]:
    """Query, key and value of self-attention."""
    shapes = ((heads, H), (K, H), (K, V))
    return [normal(batch, length, *shapes[n], seed=n) for n in range(3)]


def run(name: str, *arrays: Any, **call: Any) -> Any:
    """The kernel as one compiled program of the arrays; the rest is static."""
    return jax.jit(functools.partial(kernel_of(name), **call))(*arrays)
