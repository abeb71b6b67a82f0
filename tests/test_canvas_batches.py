"""What the sums of an objective do not depend on: padding, mates, buckets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canvas_oracle import batch_of, loss_of
from trees import named

from transformer_jax.models import CANVASES
from transformer_jax.parallel_models import Encoded
from transformer_jax.types import Batch


class Sketch:
    """The plainest model that learns; what stands behind a canvas is as it may be."""

    mask_id, blank_id = 13, 12
    length_classes, length_offset = 5, True

    def slots(self, lengths):
        return 2 * lengths

    def apply(self, variables, *arguments, method, rngs):
        params = variables["params"]
        if method == "encode":
            source, lengths = arguments
            inside = jnp.arange(source.shape[1]) < lengths[:, None]
            memory = (params["source"][source] * inside[..., None]).sum(1)
            return Encoded(memory, lengths, memory @ params["length"])
        encoded, inputs, lengths = arguments
        places = jnp.arange(inputs.shape[1])
        x = params["target"][inputs] + encoded.memory[:, None]
        logits = jnp.sin(x * (1 + places[:, None])) @ params["out"]
        behind = places >= lengths[:, None]
        return jnp.where(behind[..., None], jnp.cos(7 * logits) * len(places), logits)


@functools.cache
def compiled(objective):
    """Compiled: batch -> sums and the gradient."""
    draw = np.random.default_rng(1)
    shapes = {"source": (11, 6), "target": (14, 6), "out": (6, 13), "length": (6, 5)}
    params = {
        name: 0.5 * draw.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }

    def loss(params, batch):
        return loss_of(objective, Sketch(), batch, params=params)

    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    return functools.partial(gradient, params)


def six_rows():
    """The last one is a filler; one target is empty."""
    draw = np.random.default_rng(2)
    batch = batch_of(
        [draw.integers(4, 13, size).tolist() for size in (3, 4, 0, 1, 2, 4)],
        [4, 3, 1, 2, 4, 2],
        weight=[1, 1, 1, 1, 1, 0],
    )
    return batch._replace(source=draw.integers(4, 11, (6, 4), np.int32))


def with_garbage(batch, symbol):
    """Another symbol wherever none is; a filler row is of another length besides."""

    def padded(ids, lengths):
        counts = (np.arange(ids.shape[1]) < lengths[:, None]) & (batch.weight > 0)[
            :, None
        ]
        return np.where(counts, ids, np.int32(symbol))

    return batch._replace(
        source=padded(batch.source, batch.source_lengths),
        target=padded(batch.target, batch.target_lengths),
        target_lengths=np.where(batch.weight > 0, batch.target_lengths, symbol % 4),
    )


def assert_close(found, wanted, rtol=1e-4, atol=1e-4):
    np.testing.assert_allclose(found[0], wanted[0], rtol=rtol)
    found, wanted = named(found[1]), named(wanted[1])
    for name, leaf in wanted.items():
        np.testing.assert_allclose(
            found[name], leaf, rtol=rtol, atol=atol, err_msg=name
        )


@pytest.mark.parametrize("objective", CANVASES)
class TestModels:
    def test_padding_and_filler_rows_change_nothing(self, objective):
        found, wanted = (
            compiled(objective)(with_garbage(six_rows(), symbol)) for symbol in (4, 9)
        )
        assert_close(found, wanted, rtol=0, atol=0)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(wanted))

    def test_sums_of_parts_add_up(self, objective):
        batch = six_rows()
        whole = compiled(objective)(batch)
        part = np.array([1, 0, 1, 0, 0, 1], np.float32)
        halves = [
            compiled(objective)(batch._replace(weight=batch.weight * share))
            for share in (part, 1 - part)
        ]
        assert all(half[0][1] > 0 for half in halves)
        assert_close(jax.tree.map(jnp.add, *halves), whole)

    def test_the_bucket_and_the_order_of_rows_change_nothing(self, objective):
        batch = six_rows()
        turned = Batch(*(leaf[[3, 0, 5, 2, 1, 4]] for leaf in batch))
        wider = turned._replace(
            source=np.pad(turned.source, ((0, 0), (0, 3))),
            target=np.pad(turned.target, ((0, 0), (0, 2))),
        )
        assert_close(compiled(objective)(wider), compiled(objective)(batch))

    def test_empty_targets_are_learned_as_well(self, objective):
        batch = six_rows()
        empty = batch._replace(target_lengths=np.zeros_like(batch.target_lengths))
        (total, _), gradient = compiled(objective)(empty)
        # A length, an END or blanks are to be said.
        assert total > 0
        leaves = jax.tree.leaves(gradient)
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        assert any(leaf.any() for leaf in leaves)
