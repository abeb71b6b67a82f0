"""The passes of a batch through a model, with their random numbers."""

from typing import Any

import flax.linen as nn
import jax

from transformer_jax.types import KEPT, PyTree


class Passes:
    """Passes with one set of variables: what a loss calls a model by.

    While a key is given there is dropout, the same in all passes of one side, and what
    the model keeps besides its parameters moves on.

    Attributes:
        model: the model.
        key: PRNG key of what a loss draws, or None: nothing is drawn.
        kept: what the model keeps after the passes so far, or None if it keeps nothing.
    """

    def __init__(
        self, model: nn.Module, variables: PyTree, key: jax.Array | None
    ) -> None:
        """Prepare passes; `key` None turns dropout and corruption off."""
        self.model, self._variables = model, variables
        # Three in any case, so that a corruption changes no dropout.
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        self._encode_key, self._decode_key, self.key = keys
        self.kept = variables.get(KEPT)

    def encode(self, *arguments: Any) -> Any:
        """Return the model's `encode` of a source."""
        return self._apply("encode", arguments, self._encode_key, keep=True)

    def predict(self, *arguments: Any, keep: bool = False) -> jax.Array:
        """Return the model's `predict`, logits `[B, T, V]`.

        Args:
            arguments: those of the model's method.
            keep: this is the pass that counts, and what it saw is kept.
        """
        return self._apply("predict", arguments, self._decode_key, keep=keep)

    def classify(self, *arguments: Any) -> jax.Array:
        """Return a classifier's logits `[B, C]`."""
        return self._apply("__call__", arguments, self._encode_key, keep=True)

    def _apply(
        self, method: str, arguments: Any, key: jax.Array | None, *, keep: bool
    ) -> Any:
        rngs = {} if key is None else {"dropout": key}
        variables, apply = self._variables, self.model.apply
        if key is None or self.kept is None:
            return apply(variables, *arguments, method=method, rngs=rngs)
        variables = {**variables, KEPT: self.kept}
        rngs["redraw"] = jax.random.fold_in(key, 1)
        found, changed = apply(
            variables, *arguments, method=method, rngs=rngs, mutable=[KEPT]
        )
        if keep:
            self.kept = changed[KEPT]
        return found
