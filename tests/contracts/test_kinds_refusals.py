"""What kinds of attention refuse, in one line."""

import jax
import jax.numpy as jnp
import pytest
from kinds_oracle import (
    SETTINGS,
    B,
    H,
    K,
    N,
    T,
    V,
    arrays_of,
)

from transformer_jax import attention

pytestmark = pytest.mark.usefixtures("strict")


REFUSALS = {
    "lsh of another sequence": (
        lambda q, k, v: attention.lsh_attention(q, v[:, 1:], jnp.ones((1, H, 1))),
        "attend another sequence with dot_product",
    ),
    "lsh of other widths": (
        lambda q, k, v: attention.lsh_attention(q, v, jnp.ones((1, H + 1, 1))),
        "rotations must be",
    ),
    "a sequence longer than its projection": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((T - 1, 2)), jnp.ones((T - 1, 2))
        ),
        "is for 6 places, but there are 7",
    ),
    "two ranks": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((T, 2)), jnp.ones((T, 3))
        ),
        "one rank",
    ),
    "a projection of other heads": (
        lambda q, k, v: attention.linformer_attention(
            q, k, v, jnp.ones((3, T, 2)), jnp.ones((3, T, 2))
        ),
        "key_projection must be",
    ),
    "causal routing of another sequence": (
        lambda q, k, v: attention.routing_attention(
            q[:, 1:], k, v, jnp.ones((N, 2, H)), is_causal=True
        ),
        "causal routing is for one sequence",
    ),
    "centroids of other heads": (
        lambda q, k, v: attention.routing_attention(q, k, v, jnp.ones((K, 2, H))),
        "centroids must be",
    ),
    "sorting of another sequence": (
        lambda q, k, v: attention.sinkhorn_attention(
            q[:, 1:], k, v, jnp.ones((B, N, 1, 1)), block_size=T
        ),
        "attend another one with dot_product",
    ),
    "another number of blocks": (
        lambda q, k, v: attention.sinkhorn_attention(
            q, k, v, jnp.ones((B, N, 2, 2)), block_size=3
        ),
        "sort_logits must be",
    ),
    "no temperature": (
        lambda q, k, v: attention.sinkhorn_attention(
            q, k, v, jnp.ones((B, N, 1, 1)), block_size=T, temperature=0.0
        ),
        "temperature must be positive",
    ),
    "a kernel of other heads": (
        lambda q, k, v: attention.compressed_attention(
            q, k, v, jnp.ones((2, N, H, H)), jnp.ones((2, K, V, V)), stride=2
        ),
        "key_kernel must be",
    ),
    "no stride": (
        lambda q, k, v: attention.compressed_attention(
            q, k, v, jnp.ones((2, K, H, H)), jnp.ones((2, K, V, V)), stride=0
        ),
        "stride must be at least 1",
    ),
    "an unknown feature map": (
        lambda q, k, v: attention.linear_attention(q, k, v, feature_map="tanh"),
        "feature_map must be one of elu, relu, softplus",
    ),
    "features of other widths": (
        lambda q, k, v: attention.favor_attention(q, k, v, jnp.ones((4, H + 1))),
        "projection must be",
    ),
    "lengths of more rows": (
        lambda q, k, v: attention.linear_attention(
            q, k, v, key_value_seq_lengths=jnp.ones(3, jnp.int32)
        ),
        "key_value_seq_lengths must be",
    ),
    "logits of more places": (
        lambda q, k, v: attention.synthesizer_attention(v, jnp.ones((T, T + 1))),
        "logits .* must be as long",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(case):
    call, words = REFUSALS[case]
    arrays = arrays_of(SETTINGS["routing"]).values()
    with pytest.raises(ValueError, match=words) as refused:
        jax.eval_shape(call, *arrays)
    assert "\n" not in str(refused.value).split("\n---")[0].strip()
