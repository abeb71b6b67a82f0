"""Attention over disjoint sets of keys as one, and extra tokens that all attend."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax import masks


def merge(
    one: tuple[Float[Array, "... V"], Float[Array, "..."]],
    other: tuple[Float[Array, "... V"], Float[Array, "..."]],
) -> tuple[Float[Array, "... V"], Float[Array, "..."]]:
    """Return attention over two disjoint sets of keys, given that over each.

        lse = log(exp(lse_1) + exp(lse_2));  out = sum_m exp(lse_m - lse) out_m

    Milakov and Gimelshein 2018, section 3. Where neither has a key, out is 0.

    Args:
        one: output `[..., V]` and log-sum-exp `[...]`, as with `return_residual`.
        other: the same of the other keys.

    Returns:
        Output in the dtype of `one`'s, and log-sum-exp.

    Example:
        >>> nothing = (jnp.zeros((1, 2)), jnp.array([-jnp.inf]))
        >>> output, _ = merge((jnp.ones((1, 2)), jnp.zeros(1)), nothing)
        >>> output.tolist()
        [[1.0, 1.0]]
    """
    alive = jnp.maximum(one[1], other[1]) != -jnp.inf
    # Zeroed first: logaddexp of two -inf has a NaN gradient, even where not selected.
    safe = jnp.logaddexp(*(masks.or_zero(alive, lse) for _, lse in (one, other)))
    both = jnp.where(alive, safe, -jnp.inf)
    parts = [jnp.exp(lse - safe)[..., None] * x for x, lse in (one, other)]
    return (parts[0] + parts[1]).astype(one[0].dtype), both


def attend_with_extra(
    kernel: Callable[..., Any],
    query: Float[Array, "B eT N H"],
    key: Float[Array, "B eS K H"],
    value: Float[Array, "B eS K V"],
    extra: int,
    *,
    sequence_is_causal: bool,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    **options: Any,
) -> Float[Array, "B eT N V"]:
    """Attend where the first `extra` positions are tokens outside of the sequence.

    All attend them and they attend all that is no padding (Ainslie et al. 2020),
    whatever `options` say of the edges within the sequence: they are exempt from
    pattern and bias, and positions are counted without them. Where the sequence is
    causal they attend themselves alone, or what they read of the future would leak.

    Args:
        kernel: a row's of the ATTENTION table that returns its residual.
        query: `[B, extra + T, N, H]`.
        key: `[B, extra + S, K, H]`.
        value: `[B, extra + S, K, V]`.
        extra: how many there are.
        sequence_is_causal: whether `options` leave no edge ahead within the sequence.
        dropout_rate: as in `dot_product_attention`.
        dropout_rng: likewise; the four blocks of edges have keys of their own.
        options: what the kernel takes for the sequence.

    Returns:
        `[B, extra + T, N, V]`.

    Raises:
        NotImplementedError: there is a mask, or there are segments.
    """
    unknown = {"mask", "query_segment_ids", "key_value_segment_ids"} & {*options}
    if unknown:
        raise NotImplementedError(
            f"extra tokens go with lengths, not with {min(unknown)}: pass padding as "
            "key_value_seq_lengths"
        )
    blocks = 0
    names = ("scale", "implementation", "block_size")
    everywhere = {name: options.pop(name) for name in names if name in options}

    def attend(query: Array, keys: slice, **options: Any) -> tuple[Array, Array]:
        nonlocal blocks
        options |= everywhere
        if dropout_rate:
            options["dropout_rate"] = dropout_rate
            options["dropout_rng"] = jax.random.fold_in(dropout_rng, blocks)
        blocks += 1
        arrays = (query, key[:, keys], value[:, keys])
        return kernel(*arrays, return_residual=True, **options)

    few, rest = slice(extra), slice(extra, None)
    sequence = merge(
        attend(query[:, rest], rest, **options), attend(query[:, rest], few)
    )
    tokens = attend(query[:, few], few)
    if not sequence_is_causal:
        exempt = {"pattern", "bias", "is_causal", "query_seq_lengths"}
        options = {name: x for name, x in options.items() if name not in exempt}
        tokens = merge(tokens, attend(query[:, few], rest, **options))
    return jnp.concatenate([tokens[0], sequence[0]], 1)
