"""The step function that decoding is given; the rest is tested through `decode`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tiny import TINY

from transformer_jax.inference import make_step_fn
from transformer_jax.models import build_model

SOURCE = jnp.array([[5, 6, 7], [8, 9, 0]])
LENGTHS = jnp.array([3, 2])
TARGET = jnp.array([[1, 4, 5], [1, 12, 3]])


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, 2, 3


def test_steps_give_the_logits_of_the_model_without_symbols_that_are_no_output():
    model = build_model(TINY)
    variables = nn.unbox(model.init(jax.random.key(0), SOURCE, LENGTHS, TARGET))
    whole = np.array(model.apply(variables, SOURCE, LENGTHS, TARGET))
    whole[..., [0, 1, 3]] = -np.inf
    step_fn = make_step_fn(model, variables["params"], SOURCE, LENGTHS, Vocabulary)
    cache = model.init_cache(len(SOURCE), TARGET.shape[1])
    for place in range(TARGET.shape[1]):
        logits, cache = step_fn(TARGET[:, place], cache)
        np.testing.assert_allclose(logits, whole[:, place], rtol=0, atol=1e-5)
