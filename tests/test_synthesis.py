"""What sorts blocks, and logits that compare nothing, beside plain loops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import named

from transformer_jax.attention import parse
from transformer_jax.synthesis import SortLogits, SynthesizedLogits

B, T, D, N, SIZE, PLACES = 2, 7, 6, 2, 2, 9
DRAW = np.random.default_rng(0)
X = jnp.asarray(DRAW.normal(size=(B, T, D)), jnp.float32)
LENGTHS = jnp.array([7, 4])


def drawn(module, *arguments):
    """Parameters away from zero; what is no array tells shapes."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *arguments))
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * draw.normal(size=leaf.shape), jnp.float32),
        nn.unbox(shapes)["params"],
    )


def two_layers(params, x):
    narrow, wide = (params[f"DenseGeneral_{n}"] for n in range(2))
    hidden = np.maximum(x @ narrow["kernel"] + narrow["bias"], 0)
    return np.einsum("...d,dnp->...np", hidden, wide["kernel"]) + wide["bias"]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_sorted_by_their_means_or_by_what_comes_before(causal):
    kind = parse(f"sinkhorn(block_size={SIZE})")
    module = SortLogits(kind, (N, 5, 5), jnp.float32)
    params = drawn(module, X, T, LENGTHS, causal)
    # Nothing of a block itself or behind a row may be heard when the future is hidden.
    x = X.at[0, 2:4].set(jnp.nan) if causal else X
    x = x.at[1, 4:].set(jnp.nan)
    found = module.apply({"params": params}, x, T, LENGTHS, causal)
    assert found.shape == (B, N, 4, 4)
    for row, length in enumerate(np.array(LENGTHS)):
        for block in range(4):
            start, stop = SIZE * block, min(SIZE * (block + 1), length)
            chosen = X[row, :start][:length] if causal else X[row, start:stop]
            mean = np.asarray(chosen).sum(0) / max(1, len(chosen))
            wanted = two_layers(params, mean)[:, :4]
            if causal and row == 0 and block > 1:
                continue
            np.testing.assert_allclose(
                found[row, :, block], wanted, rtol=1e-4, atol=1e-5
            )


def test_noise_of_sorting_is_gumbel_while_there_is_dropout():
    kind = parse("sinkhorn(block_size=1)")
    module = SortLogits(kind, (N, 64, 64), jnp.float32)
    x = jnp.zeros((4, 64, D))
    params = jax.tree.map(jnp.zeros_like, drawn(module, x, 64, None, False))
    noise = module.apply(
        {"params": params}, x, 64, None, False, rngs={"dropout": jax.random.key(0)}
    )
    assert abs(float(noise.mean()) - np.euler_gamma) < 0.02
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.05


@pytest.mark.parametrize("keys", [T, 5])
@pytest.mark.parametrize("variant", ["dense", "random", "fixed", "factorized"])
def test_logits_are_those_of_the_formula(variant, keys):
    kind = parse(f"synthesizer(variant={variant}, rank=3)")
    module = SynthesizedLogits(kind, (N, PLACES, PLACES), jnp.float32)
    variables = nn.unbox(module.init(jax.random.key(0), X, keys, None, False))
    found = module.apply(variables, X, keys, None, False)
    held = {name: np.asarray(leaf) for name, leaf in named(variables).items()}
    if variant == "dense":
        params = drawn(module, X, keys, None, False)
        found = module.apply({"params": params}, X, keys, None, False)
        wanted = np.moveaxis(two_layers(params, np.asarray(X)), 2, 1)[..., :keys]
    elif variant == "factorized":
        queries, others = held["params/queries"], held["params/keys"]
        wanted = (queries @ others.swapaxes(1, 2))[None, :, :T, :keys]
    else:
        kept = "params" if variant == "random" else "attention"
        wanted = held[f"{kept}/logits"][None, :, :T, :keys]
        assert abs(wanted.std() - 1) < 0.3
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
