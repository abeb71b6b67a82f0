"""The names by which patterns are made, in code and in text."""

from collections.abc import Callable
from typing import Any

from transformer_jax.patterns import atoms
from transformer_jax.patterns.base import Pattern, per_head
from transformer_jax.patterns.random import RandomBlocks
from transformer_jax.patterns.ranges import check_integer


def full() -> Pattern:
    """Every edge."""
    return atoms.Full()


def causal() -> Pattern:
    """j <= i: nothing from the future (Vaswani et al. 2017, section 3.2.3)."""
    return atoms.Causal()


def local(left: int, right: int | None = None, *, dilation: int = 1) -> Pattern:
    """A window: -left dilation <= j - i <= right dilation, and dilation divides j - i.

    Both ends belong to it, as in `jax.nn.dot_product_attention`; `right` defaults to
    `left`. A window "of W" is local(W // 2) in Longformer (Beltagy et al. 2020, section
    3.1, https://arxiv.org/abs/2004.05150) and causal() & local(W - 1) in Mistral, where
    W counts the position itself (Jiang et al. 2023, section 2,
    https://arxiv.org/abs/2310.06825).

    Raises:
        TypeError, ValueError: an argument is no integer from 0 on, or the dilation none
            from 1 on.
    """
    return atoms.Local(
        check_integer("left", left, 0),
        check_integer("right", left if right is None else right, 0),
        check_integer("dilation", dilation, 1),
    )


def strided(stride: int, reach: int | None = None) -> Pattern:
    """`stride` divides i - j, and |i - j| <= reach stride if a reach is given.

    Child et al. 2019, section 4.3 (https://arxiv.org/abs/1904.10509), whose strided
    attention is, with causal(), the union with local(stride).

    Raises:
        TypeError, ValueError: the stride is no integer from 1 on, the reach from 0 on.
    """
    return atoms.Strided(
        check_integer("stride", stride, 1),
        None if reach is None else check_integer("reach", reach, 0),
    )


def fixed(block: int, summary: int) -> Pattern:
    """One block, or j is one of the last `summary` positions of its block.

    Child et al. 2019, section 4.3.

    Raises:
        TypeError, ValueError: no integers with 1 <= summary <= block.
    """
    pattern = atoms.Fixed(
        check_integer("block", block, 1), check_integer("summary", summary, 1)
    )
    if summary > block:
        raise ValueError(f"summary must be at most the block, {block}, not {summary}")
    return pattern


def chunked(size: int) -> Pattern:
    """i and j lie in one chunk of `size` positions.

    Raises:
        TypeError, ValueError: the size is no integer from 1 on.
    """
    return atoms.Chunked(check_integer("size", size, 1))


def global_tokens(tokens: int | tuple[int, ...]) -> Pattern:
    """i or j is global: one of the first `tokens` positions, or of a tuple of them.

    Beltagy et al. 2020, section 3.1 (https://arxiv.org/abs/2004.05150).

    Raises:
        TypeError, ValueError: no integer from 1 on, and no tuple of some from 0 on.
    """
    if not isinstance(tokens, (tuple, list)):
        return atoms.GlobalTokens(check_integer("tokens", tokens, 1))
    if not tokens:
        raise ValueError("global_tokens() wants at least one position")
    positions = {check_integer("a global position", each, 0) for each in tokens}
    return atoms.GlobalTokens(tuple(sorted(positions)))


def random_blocks(count: int, block: int, seed: int = 0) -> Pattern:
    """Each block of positions is linked with `count` random ones before it, both ways.

    After Zaheer et al. 2020 (BigBird), section 2 (https://arxiv.org/abs/2007.14062).
    What is drawn depends on the seed alone, not on lengths; a block with fewer before
    it takes all, and none is linked with itself.

    Raises:
        TypeError, ValueError: no integers from 1 on, the seed from 0 on.
    """
    return RandomBlocks(
        check_integer("count", count, 1),
        check_integer("block", block, 1),
        check_integer("seed", seed, 0),
    )


def rule(function: Callable[..., Any], *arguments: Any) -> Pattern:
    """The edges for which `function(i, j, *arguments)` is true.

    It gets integer arrays that broadcast, of NumPy or of JAX, and returns booleans by
    operators alone. It is of a module, so that equal rules are equal; the arguments are
    hashable. It has no text to parse, and no tile of it is known to be empty.

    Raises:
        TypeError: it is no function, or an argument is not hashable.
        ValueError: it is a lambda or of another function.
    """
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise TypeError(f"rule() takes a function of i and j, not {function!r}")
    if "<" in function.__qualname__:
        raise ValueError(
            f"rule() takes a function of a module, not {function.__qualname__}: two of "
            "those would never be equal, and each would be compiled again"
        )
    pattern = atoms.Rule(function, arguments)
    hash(pattern)
    return pattern


PATTERNS: dict[str, Callable[..., Pattern]] = {
    "causal": causal,
    "chunked": chunked,
    "fixed": fixed,
    "full": full,
    "global_tokens": global_tokens,
    "local": local,
    "per_head": per_head,
    "random_blocks": random_blocks,
    "strided": strided,
}
