"""Functions of parameters and rows, compiled once for every shape."""

import time
from collections.abc import Callable
from typing import Any

import jax

from transformer_jax.sharding import batch_sharding, replicated
from transformer_jax.types import PyTree

# Batches have few shapes: powers of two times this many rows, up to a limit.
FEWEST_ROWS = 8


class Executables:
    """Compiles functions `(variables, *arguments)` ahead of time, and counts that.

    What they return is spread over the devices by rows; what has no rows is on all.

    Attributes:
        compilations: executables made so far.
        compile_seconds: time spent on making them.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self.mesh = mesh
        self.compilations, self.compile_seconds = 0, 0.0
        self._made: dict[Any, Callable] = {}

    def rows(self, wanted: int, most: int) -> int:
        """Return the rows of the smallest batch for `wanted`, or of the largest.

        Batches have at most `most` rows, rounded up to a multiple of the devices.
        """
        devices = self.mesh.shape["data"]
        rows = min(FEWEST_ROWS, most)
        while rows < min(wanted, most):
            rows = min(2 * rows, most)
        return -(-rows // devices) * devices

    def put(self, *rows: Any) -> Any:
        """Lay arrays of rows over the devices."""
        return jax.device_put(rows, batch_sharding(self.mesh))

    def call(
        self,
        piece: Callable,
        variables: PyTree,
        *arguments: Any,
        donate: tuple[int, ...] = (),
        **static: Any,
    ) -> Any:
        """Run a piece, compiled once for every shape and every static argument.

        Args:
            piece: pure function (variables, *arguments, **static).
            variables: the model's, of the same shapes in every call of a piece.
            arguments: arrays, or trees of them.
            donate: which arguments, the variables being number 0, may be overwritten.
            static: Python values that the program is made for.
        """
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(arguments))
        key = piece, shapes, tuple(sorted(static.items()))
        if key not in self._made:
            began = time.perf_counter()

            def run(variables: PyTree, *arguments: Any) -> Any:
                return piece(variables, *arguments, **static)

            results = jax.eval_shape(run, variables, *arguments)
            jitted = jax.jit(
                run, out_shardings=self._shardings(results), donate_argnums=donate
            )
            self._made[key] = jitted.lower(variables, *arguments).compile()
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - began
        return self._made[key](variables, *arguments)

    def _shardings(self, tree: PyTree) -> PyTree:
        """Rows over the devices; what has no rows on all of them."""
        rows, whole = batch_sharding(self.mesh), replicated(self.mesh)
        return jax.tree.map(lambda leaf: rows if leaf.ndim else whole, tree)
