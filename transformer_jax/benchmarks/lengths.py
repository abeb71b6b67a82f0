"""Natural lengths for weights drawn by chance, which never end an output by themselves.

END's embedding serves for nothing but its own logit, so it can be fitted: the logit
rises by each place of the output and passes those of all other tokens about where the
wanted length is. All systems get the fitted weights.
"""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.benchmarks.shape import Sources, Symbols
from transformer_jax.models import Seq2Seq
from transformer_jax.types import PyTree

# How much the logit of END rises a place; and what keeps the fit from extremes.
RISE = 0.5
RIDGE = 1.0


def fit_end(
    model: Seq2Seq,
    params: PyTree,
    symbols: Symbols,
    sources: Sources,
    outputs: np.ndarray,
    wanted: np.ndarray,
) -> tuple[PyTree, float]:
    """Return parameters with END's row fitted, and the bias of its logit.

    w, b = argmin sum_nt (w . x_nt + b - max_v logits_ntv - RISE (t - wanted_n))^2
    + RIDGE (w . w + b^2), over the decoder's states x.

    Args:
        model: from `build_model`, embeddings shared by all sides.
        params: its parameters; not changed.
        symbols: the special symbols.
        sources: `[B, S]` and their lengths.
        outputs: int `[B, T]`, what the model writes when it may not end.
        wanted: `[B]`, lengths to be had.
    """
    start = np.full((len(outputs), 1), symbols.bos_id)
    inputs = np.concatenate([start, outputs[:, :-1]], axis=1).astype(np.int32)
    states = np.asarray(_states(model, params, sources, inputs), np.float64)
    table = params["source_frontend"]["embedding"]["embedding"]
    logits = states @ np.asarray(table, np.float64).T
    logits[..., [*symbols]] = -np.inf
    rise = RISE * (np.arange(inputs.shape[1]) - wanted[:, None])
    goal = (logits.max(-1) + rise).reshape(-1)
    features = states.reshape(len(goal), -1)
    features = np.concatenate([features, np.ones((len(goal), 1))], axis=1)
    normal = features.T @ features + RIDGE * np.eye(features.shape[1])
    fitted = np.linalg.solve(normal, features.T @ goal)
    row = jnp.asarray(fitted[:-1], table.dtype)
    frontend = {"embedding": {"embedding": table.at[symbols.end_id].set(row)}}
    return {**params, "source_frontend": frontend}, float(fitted[-1])


def _states(
    model: Seq2Seq, params: PyTree, sources: Sources, inputs: np.ndarray
) -> jax.Array:
    """The decoder's states `[B, T, D]` of a teacher-forced pass."""

    def decode(model: Seq2Seq, *arrays: jax.Array) -> jax.Array:
        ids, lengths, inputs = arrays
        memory = model.encode(ids, lengths)
        return model.decoder(model.target_frontend(inputs), memory, lengths)

    apply = jax.jit(lambda *arrays: model.apply(*arrays, method=decode))
    return apply({"params": params}, *sources, inputs)
