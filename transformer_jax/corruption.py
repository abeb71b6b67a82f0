"""What a decoder reads while it is trained, other than it would otherwise.

Teacher forcing shows an autoregressive decoder right answers alone; decoding feeds it
its own. A parallel decoder sees no answer at all, and has to guess everything at once.
A corruption replaces some of the inputs, after a first pass where it wants to know what
the model would have said. All have one signature, the table is `CORRUPTIONS`:

    (given, predict, key, keep, vocabulary) -> DecoderInputs

    given: `DecoderInputs` of teacher forcing, or of an empty canvas.
    predict: inputs `[B, T]` -> logits `[B, T, V]`, a pass with the present parameters.
    key: PRNG key.
    keep: float32 [], share of right inputs, by `KEEP_SCHEDULES`.
    vocabulary: the target's.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import TrainConfig
from transformer_jax.masks import lowest_places

# inputs [B, T] -> logits [B, T, V]
Predict = Callable[[jax.Array], jax.Array]


class DecoderInputs(NamedTuple):
    """What a decoder is trained on, each `[B, T]`.

    Attributes:
        inputs: int32, what it reads: BOS first, or `mask_id` in empty places.
        labels: int32, what it shall say.
        weights: float32, what each place counts in the loss.
    """

    inputs: jax.Array
    labels: jax.Array
    weights: jax.Array


# (given, predict, key, vocabulary, ...) -> DecoderInputs, with one step's share bound
Corruption = Callable[..., DecoderInputs]


def scheduled_sampling(
    given: DecoderInputs,
    predict: Predict,
    key: jax.Array,
    keep: jax.Array,
    vocabulary: Any,
    *,
    choice: str = "argmax",
) -> DecoderInputs:
    """Replace inputs by the model's own answers, found in a first pass in parallel.

        input[t + 1] = y[t] with chance `keep`, else the model's answer at t to the
        right inputs up to t

    Bengio et al. 2015; for Transformers, in two passes: Mihaylova and Martins 2019,
    section 3. No gradient flows through the first pass. BOS stays, and only symbols
    that decoding would feed replace anything. With `keep` 1 nothing is replaced.

    Args:
        given: right inputs.
        predict: the first pass, with the same dropout as the second.
        key: draws places, and answers if `choice` is "sample".
        keep: share of the inputs to keep, expected.
        vocabulary: has `special_ids`.
        choice: "argmax", the most probable answer, or "sample", one drawn from the
            model's distribution.
    """
    place_key, answer_key = jax.random.split(key)
    # Answers have no gradient; said at once, nothing is kept for a backward pass.
    logits = jax.lax.stop_gradient(predict(given.inputs))
    logits = logits.at[..., _specials(vocabulary)].set(-jnp.inf)
    if choice == "sample":
        answers = jax.random.categorical(answer_key, logits)
    else:
        answers = jnp.argmax(logits, axis=-1)
    # The answer at t is the input at t + 1.
    return _replaced(given, jnp.roll(answers, 1, axis=1), place_key, keep)


def random_replacement(
    given: DecoderInputs,
    predict: Predict,
    key: jax.Array,
    keep: jax.Array,
    vocabulary: Any,
) -> DecoderInputs:
    """Replace inputs by any symbols, all equally probable.

    The plainest way to show a decoder wrong answers; needs no first pass. BOS stays.
    Wang et al. 2018 (SwitchOut) draw replacements likewise, on both sides.

    Args:
        given: right inputs.
        predict: not called.
        key: draws places and symbols.
        keep: share of the inputs to keep, expected; a symbol may replace itself.
        vocabulary: has `size` and `special_ids`.
    """
    del predict
    place_key, symbol_key = jax.random.split(key)
    symbols = np.setdiff1d(np.arange(vocabulary.size), _specials(vocabulary))
    drawn = jax.random.choice(symbol_key, jnp.asarray(symbols), given.inputs.shape)
    return _replaced(given, drawn, place_key, keep)


def glancing(
    given: DecoderInputs,
    predict: Predict,
    key: jax.Array,
    keep: jax.Array,
    vocabulary: Any,
    *,
    align: Callable[[jax.Array], jax.Array] | None = None,
) -> DecoderInputs:
    """Show some right answers to a decoder that writes all places at once.

    The first pass sees none; of the places where it is wrong, a share is shown:

        N = floor(keep * number of wrong places);  N of all places, drawn by chance,
        read their right answers and count nothing in the loss

    Qian et al. 2021, section 3; for CTC the right answers are those of the best
    alignment (Gu and Kong 2021). No gradient flows through the first pass.

    Args:
        given: an empty canvas and its right answers; weight 0 is no place.
        predict: the first pass, with the same dropout as the second.
        key: draws the places.
        keep: share of the wrong places to show.
        vocabulary: not used.
        align: logits `[B, T, V]` -> right answers `[B, T]`, where those depend on what
            the model says; None means the labels.
    """
    del vocabulary
    # Answers have no gradient; said at once, nothing is kept for a backward pass.
    logits = jax.lax.stop_gradient(predict(given.inputs))
    right = given.labels if align is None else align(logits)
    places = given.weights > 0
    wrong = ((jnp.argmax(logits, axis=-1) != right) & places).sum(1)
    count = jnp.floor(keep * wrong).astype(jnp.int32)
    shown = lowest_places(jax.random.uniform(key, places.shape), places, count)
    return given._replace(
        inputs=jnp.where(shown, right.astype(given.inputs.dtype), given.inputs),
        weights=jnp.where(shown, 0.0, given.weights),
    )


CORRUPTIONS = {
    "scheduled_sampling": scheduled_sampling,
    "random_replacement": random_replacement,
    "glancing": glancing,
}

# Share of right inputs that step t keeps: (t, scale in steps) -> float32 []. Bengio et
# al. 2015, section 2.4; their k is exp(-1 / scale) where the decay is exponential.
KEEP_SCHEDULES = {
    "constant": lambda t, scale: jnp.zeros_like(t),
    "linear": lambda t, scale: 1 - t / scale,
    "exponential": lambda t, scale: jnp.exp(-t / scale),
    "inverse_sigmoid": lambda t, scale: scale / (scale + jnp.exp(t / scale)),
}


def keep_share(
    schedule: str, step: jax.Array, *, scale: int, floor: float, start: float = 1.0
) -> jax.Array:
    """Return the share of right inputs at a step: from `start` on, down to `floor`."""
    share = KEEP_SCHEDULES[schedule](step.astype(jnp.float32), scale)
    return jnp.maximum(start * share, floor)


def corruption_at(config: TrainConfig, step: jax.Array) -> Corruption | None:
    """Return what `train.corruption` does at a step, None if nothing.

    Args:
        config: names the corruption, its choice and its schedule.
        step: int32 [], updates made so far.
    """
    if config.corruption == "none":
        return None
    keep = keep_share(
        config.keep_schedule,
        step,
        start=config.keep_start,
        scale=config.keep_scale,
        floor=config.keep_floor,
    )
    options = {}
    if config.corruption == "scheduled_sampling":
        options["choice"] = config.corruption_choice
    corrupt = functools.partial(CORRUPTIONS[config.corruption], **options)

    def at_this_step(
        given: DecoderInputs,
        predict: Predict,
        key: jax.Array,
        vocabulary: Any,
        **hints: Any,
    ) -> DecoderInputs:
        return corrupt(given, predict, key, keep, vocabulary, **hints)

    return at_this_step


def _replaced(
    given: DecoderInputs, others: jax.Array, key: jax.Array, keep: jax.Array
) -> DecoderInputs:
    """Take `others` with chance 1 - keep; never in the first place, BOS."""
    kept = jax.random.uniform(key, given.inputs.shape) < keep
    kept = kept.at[:, 0].set(True)
    others = others.astype(given.inputs.dtype)
    return given._replace(inputs=jnp.where(kept, given.inputs, others))


def _specials(vocabulary: Any) -> np.ndarray:
    return np.array(vocabulary.special_ids)
