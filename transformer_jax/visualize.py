"""Pictures. They need the extra `plots`."""

import importlib.util
import io
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from transformer_jax.attention.sparse.parts import partition
from transformer_jax.config import ConfigError, remedy
from transformer_jax.patterns import Pattern

# What each constructor of one head looks like, and patterns of well-known papers.
GALLERY = {
    "full": "full()",
    "causal": "causal()",
    "local": "local(6)",
    "local, dilated": "local(4, dilation=3)",
    "strided": "strided(8)",
    "strided, near": "strided(4, 3)",
    "fixed": "fixed(8, 2)",
    "chunked": "chunked(12)",
    "global tokens": "global_tokens((0, 1, 30))",
    "random blocks": "random_blocks(2, 4)",
    "complement": "causal() & ~local(6)",
    "Sparse Transformer, strided (Child et al. 2019)": (
        "causal() & (local(8) | strided(8))"
    ),
    "Sparse Transformer, fixed (Child et al. 2019)": "causal() & fixed(8, 2)",
    "Longformer (Beltagy et al. 2020)": "local(5) | global_tokens(2)",
    "BigBird (Zaheer et al. 2020)": (
        "local(5) | global_tokens(4) | random_blocks(2, 4)"
    ),
}
COLUMNS = 5
# Colours of a block that is empty, partial or full, and of an edge.
SHADES = ("#ffffff", "#f2c57c", "#d1495b")
EDGE = "#22577a"


def require_plots() -> None:
    """Refuse before work starts.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"pictures need matplotlib: {remedy('plots')}")


def draw_patterns(
    patterns: Mapping[str, Pattern], path: pathlib.Path, *, length: int, block: int
) -> list[dict[str, Any]]:
    """Draw patterns as PNG: edges above, what blocks hold below.

    Args:
        patterns: title -> pattern of one head.
        path: where to write.
        length: queries and keys.
        block: positions of a block's side.

    Returns:
        for each its text, the share of edges (`density`), of blocks that are not empty
        (`blocks`), and of edges that a kernel computes in its own order (`computed`).
    """
    import matplotlib.figure

    rows = -(-len(patterns) // COLUMNS)
    figure = matplotlib.figure.Figure(
        (2.4 * COLUMNS, 5.6 * rows), layout="constrained", facecolor="white"
    )
    grid = figure.subplots(2 * rows, COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    found = []
    for number, (title, pattern) in enumerate(patterns.items()):
        row, column = divmod(number, COLUMNS)
        shares = _shares(pattern, length, block)
        above, below = grid[2 * row][column], grid[2 * row + 1][column]
        _draw(above, pattern.dense(length, length), ("#ffffff", EDGE))
        above.set_title(f"{title}\n{pattern}", fontsize=6, wrap=True)
        _draw(below, _states(pattern, length, block), SHADES)
        below.set_title(
            f"edges {shares['density']:.1%}, blocks {shares['blocks']:.1%}, "
            f"computed {shares['computed']:.1%}",
            fontsize=6,
        )
        found.append({"pattern": str(pattern), **shares})
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    path.write_bytes(picture.getvalue())
    return found


def _draw(axes: Any, values: np.ndarray, colours: tuple[str, ...]) -> None:
    import matplotlib.colors

    axes.set_axis_on()
    axes.set_xticks([])
    axes.set_yticks([])
    axes.imshow(
        values.astype(int),
        cmap=matplotlib.colors.ListedColormap(colours),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        interpolation="nearest",
    )


def _states(pattern: Pattern, length: int, block: int) -> np.ndarray:
    starts = np.arange(0, length, block)
    stops = np.minimum(starts + block, length)
    return pattern.block_states(starts[:, None], stops[:, None], starts, stops)


def _shares(pattern: Pattern, length: int, block: int) -> dict[str, float]:
    parts = partition(pattern, length, length, block=block)
    return {
        "density": round(pattern.density(length, length), 4),
        "blocks": round(pattern.density(length, length, block=block), 4),
        "computed": round(sum(part.edges for part in parts) / length**2, 4),
    }
