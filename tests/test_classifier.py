"""Classification: the model, its loss, its decoding."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY
from trees import named

from transformer_jax.class_generation import ClassGenerator
from transformer_jax.config import DecodeConfig, ParallelConfig, TrainConfig
from transformer_jax.decoding import Status, classify
from transformer_jax.metrics import Accuracy
from transformer_jax.models import build_model, init_variables
from transformer_jax.objectives import training_loss, validation_loss
from transformer_jax.sharding import make_mesh, replicated
from transformer_jax.types import Batch

B, S = 8, 5
DRAW = np.random.default_rng(0)
SOURCE = DRAW.integers(4, 11, (B, S), np.int32)
LENGTHS = np.int32([5, 2, 4, 1, 3, 5, 2, 4])
BATCH = Batch(
    source=SOURCE,
    source_lengths=LENGTHS,
    target=DRAW.integers(4, 13, (B, 3), np.int32),
    # One target is empty, one of two symbols; one row is a filler.
    target_lengths=np.int32([1, 1, 0, 1, 2, 1, 1, 1]),
    weight=np.float32([1, 1, 1, 1, 1, 1, 1, 0]),
    index=np.arange(B, dtype=np.int32),
)


class Vocabulary:
    pad_id, bos_id, end_id, unk_id = 0, 1, 2, 3


@functools.cache
def build(pooling):
    config = dataclasses.replace(TINY, pooling=pooling)
    model = build_model(config, "classification")
    shapes = jax.eval_shape(lambda: init_variables(model, jax.random.key(0)))
    draw = np.random.default_rng(1)
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * draw.normal(size=leaf.shape), leaf.dtype),
        nn.unbox(shapes),
    )
    return model, variables, jax.jit(model.apply)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
class TestEveryPooling:
    def test_rows_and_padding_do_not_matter(self, pooling):
        _, variables, forward = build(pooling)
        found = forward(variables, SOURCE, LENGTHS)
        behind = np.arange(S) >= LENGTHS[:, None]
        other = np.where(behind, 7, SOURCE)
        other[0] = 4
        changed = forward(variables, other, LENGTHS)
        np.testing.assert_allclose(changed[1:], found[1:], rtol=1e-5, atol=1e-6)
        assert np.abs(changed[0] - found[0]).max() > 0.01

    def test_the_loss_is_that_of_the_class(self, pooling):
        model, variables, forward = build(pooling)
        config = TrainConfig(objective="classification", label_smoothing=0.0)
        loss = training_loss(model, Vocabulary, config)
        gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
        parts = variables["params"], None, BATCH, jax.random.key(0), 0
        (total, (weight, kept)), found = gradient(*parts)
        logits = np.float64(forward(variables, SOURCE, LENGTHS))
        said = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        rows = [0, 1, 3, 5, 6]
        wanted = -said[rows, BATCH.target[rows, 0]].sum()
        np.testing.assert_allclose([total, weight], [wanted, 5], rtol=1e-5)
        assert kept is None
        for name, leaf in named(found).items():
            assert leaf.any(), name
        plain = jax.jit(validation_loss(model, Vocabulary, config))
        sums = plain(variables, BATCH)
        np.testing.assert_allclose(sums, [total, weight], rtol=1e-5)


def test_mean_and_token_are_what_they_say():
    """The state of the first place, and the mean of all valid ones."""
    model, variables, forward = build("mean")

    def states(model, source, lengths):
        return model.encoder(model.source_frontend(source), lengths)

    found = model.apply(variables, SOURCE, LENGTHS, method=states)
    means = np.stack([row[:n].mean(0) for row, n in zip(found, LENGTHS, strict=True)])
    head = variables["params"]["output"]
    wanted = means @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(forward(variables, SOURCE, LENGTHS), wanted, rtol=1e-4)
    model, variables, forward = build("cls")
    token = variables["params"]["cls"]

    def first(model, source, lengths):
        x = model.source_frontend(source)
        x = jnp.concatenate([jnp.tile(token, (B, 1, 1)), x], 1)
        return model.encoder(x, lengths + 1)[:, 0]

    head = variables["params"]["output"]
    wanted = model.apply(variables, SOURCE, LENGTHS, method=first) @ head["kernel"]
    np.testing.assert_allclose(
        forward(variables, SOURCE, LENGTHS), wanted + head["bias"], rtol=1e-4, atol=1e-5
    )


def test_classes_come_best_first():
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.0, 0.3], [0.25, 0.25, 0.25, 0.25]]))
    found = classify(logits, num_return=5, pad_id=9)
    assert found.tokens[0, :, 0].tolist() == [1, 3, 0, 9, 9]
    assert found.tokens[1, :, 0].tolist() == [0, 1, 2, 3, 9]
    assert found.lengths.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    np.testing.assert_allclose(found.scores[0, :3], np.log([0.6, 0.3, 0.1]), rtol=1e-5)
    ok, absent = Status.OK, Status.ABSENT
    assert found.status[0].tolist() == [ok, ok, ok, absent, absent]
    with pytest.raises(ValueError, match="num_return must be an integer from 1 on"):
        classify(logits, num_return=0, pad_id=9)


@pytest.mark.parametrize("devices", [1, 8])
def test_generated_classes_are_those_that_may_be(devices):
    model, variables, forward = build("mean")
    mesh = make_mesh(ParallelConfig(data=devices))
    made = ClassGenerator(
        model,
        jax.device_put(variables, replicated(mesh)),
        DecodeConfig(strategy="classify", rows=B),
        Vocabulary,
        mesh,
        nbest=2,
        forbidden=[7],
    )
    found = made(SOURCE, LENGTHS, np.arange(B))
    logits = np.array(forward(variables, SOURCE, LENGTHS))
    logits[:, [0, 1, 2, 3, 7]] = -np.inf
    order = np.argsort(-logits, axis=1)[:, :2]
    np.testing.assert_array_equal(found.tokens[..., 0], order)
    said = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    scores = np.take_along_axis(said, order, axis=1)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-4, atol=1e-5)


def test_accuracy_is_told_beside_the_commonest_class():
    accuracy = Accuracy()
    with pytest.raises(ValueError, match="nothing was added"):
        accuracy.result()
    for found, right in (("1", "1"), ("2", "1"), ("", "3"), ("1", "1")):
        accuracy.add(found, [right])
    assert accuracy.result() == {"accuracy": 50.0, "majority": 75.0, "examples": 4}
    with pytest.raises(ValueError, match="at least one reference"):
        accuracy.add("1", [])
