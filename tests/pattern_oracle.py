"""Patterns in the words of their table: an edge at a time, in plain Python.

`allows("local(2) | causal()", i, j)` reads the text itself, so that neither the parser
nor the patterns are trusted.
"""

import numpy as np
from hypothesis import strategies as st

from transformer_jax import patterns


class Edge:
    """The constructors as they are seen from one edge; `&`, `|`, `~` work on truth."""

    def __init__(self, i: int, j: int) -> None:
        self.i, self.j = i, j
        self.words = {
            name: getattr(self, name)
            for name in dir(self)
            if not name.startswith("_") and callable(getattr(self, name))
        }

    def full(self):
        return np.bool_(True)

    def causal(self):
        return np.bool_(self.j <= self.i)

    def local(self, left, right=None, *, dilation=1):
        right = left if right is None else right
        difference = self.j - self.i
        inside = -left * dilation <= difference <= right * dilation
        return np.bool_(inside and difference % dilation == 0)

    def strided(self, stride, reach=None):
        near = reach is None or abs(self.i - self.j) <= reach * stride
        return np.bool_((self.i - self.j) % stride == 0 and near)

    def fixed(self, block, summary):
        last = range(block - summary, block)
        same = self.i // block == self.j // block
        return np.bool_(same or self.j % block in last)

    def chunked(self, size):
        return np.bool_(self.i // size == self.j // size)

    def global_tokens(self, tokens):
        chosen = range(tokens) if isinstance(tokens, int) else tokens
        return np.bool_(self.i in chosen or self.j in chosen)

    def random_blocks(self, count, block, seed=0):
        """The draws are the pattern's own; that links hold both ways is not."""
        pattern = patterns.random_blocks(count, block, seed)
        one, other = self.i // block, self.j // block
        draws = [
            {int(x) for x in np.ravel(pattern.drawn(np.array([b])))}
            for b in (one, other)
        ]
        return np.bool_(other in draws[0] or one in draws[1])


def allows(text: str, i: int, j: int) -> bool:
    """Tell whether the query at i may attend the key at j."""
    return bool(eval(text, {"__builtins__": {}}, Edge(i, j).words))


def dense(text: str, rows: int, columns: int, offset: int = 0) -> np.ndarray:
    """Every edge, `[rows, columns]`."""
    return np.array(
        [[allows(text, i + offset, j) for j in range(columns)] for i in range(rows)]
    ).reshape(rows, columns)


ATOMS = (
    "full()",
    "causal()",
    "local(0)",
    "local(3)",
    "local(2, 0)",
    "local(0, 5)",
    "local(2, 1, dilation=3)",
    "strided(1)",
    "strided(4)",
    "strided(5, 2)",
    "strided(3, 0)",
    "fixed(5, 2)",
    "fixed(4, 4)",
    "chunked(1)",
    "chunked(7)",
    "global_tokens(1)",
    "global_tokens(3)",
    "global_tokens((0, 5, 6, 18))",
    "random_blocks(2, 3)",
    "random_blocks(1, 4, seed=9)",
)
COMPOUNDS = (
    "causal() & (local(3) | strided(4) | global_tokens(2))",
    "local(2) | random_blocks(2, 3) | global_tokens((1, 7, 9))",
    "causal() & fixed(5, 2)",
    "~local(3)",
    "~(causal() | strided(3)) & ~chunked(4)",
)


def texts() -> st.SearchStrategy[str]:
    """Unions, intersections and complements of atoms."""
    pairs = {"&": "({} & {})", "|": "({} | {})"}

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        joined = st.tuples(st.sampled_from(sorted(pairs)), inner, inner).map(
            lambda each: pairs[each[0]].format(*each[1:])
        )
        return joined | inner.map("~{}".format)

    return st.recursive(st.sampled_from(ATOMS), grow, max_leaves=4)
