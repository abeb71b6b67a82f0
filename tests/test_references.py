"""Several references of a source, of which any is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canvas_oracle import (
    BLANK,
    MASK,
    OUTPUTS,
    batch_of,
    collapsed,
    loss_of,
    score,
    slots_of,
)


class Table:
    """Stands for a model of either objective that may have several references.

    The row's source tells its logits: of slots, or of what follows what.
    """

    mask_id, blank_id = MASK, BLANK
    logits = np.random.default_rng(5).normal(size=(4, 8, OUTPUTS)).astype(np.float32)

    def slots(self, lengths):
        return 2 * lengths

    def apply(self, variables, *arguments, method, rngs):
        if method == "encode":
            return jnp.asarray(self.logits)[arguments[0][:, 0]]
        memory, second, third, *_ = arguments
        if second.ndim == 2:  # The inputs of a canvas, then their lengths.
            return memory[:, : second.shape[1]]
        return jnp.take_along_axis(memory, third[..., None], axis=1)


SOURCES = [3, 2, 3, 2]
ONES = [[4, 5, 6], [6], [], [5, 4]]
OTHERS = [[4, 6], [5, 5], [6], [4]]


def table_batch(*references):
    """Targets `[4, R, T]` of R lists; None where a row has no such reference."""
    each = [
        batch_of([target or [] for target in targets], SOURCES, places=4)
        for targets in references
    ]
    lengths = np.stack([part.target_lengths for part in each], axis=1)
    there = [
        [target is not None for target in row] for row in zip(*references, strict=True)
    ]
    return each[0]._replace(
        source=np.arange(4, dtype=np.int32)[:, None].repeat(3, axis=1),
        target=np.stack([part.target for part in each], axis=1),
        target_lengths=np.where(there, lengths, np.int32(-1)),
    )


def only(batch, number=0):
    """The batch of one reference a row, as it is without others."""
    return batch._replace(
        target=batch.target[:, number], target_lengths=batch.target_lengths[:, number]
    )


@functools.cache
def table_loss(objective):
    return jax.jit(functools.partial(loss_of, objective, Table()))


@pytest.mark.parametrize("objective", ["autoregressive", "ctc"])
class TestReferences:
    def alone(self, objective, batch):
        """The sums of each row."""
        rows = np.eye(4, dtype=np.float32)
        found = [table_loss(objective)(batch._replace(weight=row)) for row in rows]
        return np.array(found, np.float64).T

    def test_one_reference_is_the_plain_loss(self, objective):
        batch = table_batch(ONES)
        assert batch.target.shape == (4, 1, 4)
        found, plain = table_loss(objective)(batch), table_loss(objective)(only(batch))
        np.testing.assert_allclose(found, plain, rtol=1e-6)

    def test_of_two_references_either_is_right(self, objective):
        batch = table_batch(ONES, OTHERS)
        losses, sizes = zip(
            *(self.alone(objective, only(batch, number)) for number in (0, 1)),
            strict=True,
        )
        total = -np.log(np.exp(-np.array(losses)).sum(0)).sum()
        wanted = [total, np.mean(sizes, axis=0).sum()]
        np.testing.assert_allclose(table_loss(objective)(batch), wanted, rtol=1e-5)

    def test_a_missing_reference_changes_nothing(self, objective):
        batch = table_batch(ONES, [None] * 4)
        plain = table_loss(objective)(only(batch))
        np.testing.assert_allclose(table_loss(objective)(batch), plain, rtol=1e-6)
        # Nor does what stands there, nor which of them is missing.
        batch = table_batch([None] * 4, ONES)
        batch.target[:, 0] = 6
        np.testing.assert_allclose(table_loss(objective)(batch), plain, rtol=1e-6)

    def test_filler_rows_have_no_reference_and_count_nothing(self, objective):
        batch = table_batch([ONES[0], None, *ONES[2:]])
        batch.weight[1] = 0
        wanted = self.alone(objective, only(table_batch(ONES)))[:, [0, 2, 3]].sum(1)
        np.testing.assert_allclose(table_loss(objective)(batch), wanted, rtol=1e-5)


def test_glancing_aligns_the_best_reference_blanks_included():
    """Against all ways to write it: the right answers are the most probable one."""
    references = ([[4, 5], [5, 5], [6, 6, 6], [5, 6]], [[6], None, [4, 6], [4]])
    sizes = [2 * size for size in SOURCES]
    key = jax.random.key(0)

    @jax.jit
    def align(batch):
        seen = []

        def corrupt(given, predict, key, vocabulary, *, align):
            seen.append((given.weights, align(predict(given.inputs))))
            return given

        sums = loss_of("ctc", Table(), batch, key=key, corrupt=corrupt)
        return sums, *seen[0]

    batch = table_batch(*references)
    sums, places, aligned = align(batch)
    np.testing.assert_allclose(sums, table_loss("ctc")(batch), rtol=1e-6)
    for row, size in enumerate(sizes):
        assert places[row].tolist() == [1.0] * size + [0.0] * (6 - size)
        wanted = [targets[row] for targets in references]
        ways = [way for way in slots_of(size) if collapsed(way) in wanted]
        best = max(ways, key=functools.partial(score, Table.logits[row]))
        assert aligned[row, :size].tolist() == list(best)
        assert collapsed(aligned[row, :size].tolist()) in wanted
