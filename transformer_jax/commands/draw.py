"""transformer-jax draw: pictures of what attention can see.

  transformer-jax draw patterns [--output=patterns.png] [--length=48] [--block=4]
      [--patterns="local(8); causal() & strided(4)"]

Without --patterns it is a gallery of the constructors and of Sparse Transformer,
Longformer and BigBird. Above stand the edges, below what blocks of them hold: nothing,
some, all.

Prints one JSON line: output, and for each pattern the share of edges, of blocks that
are not empty, and of edges that the kernel computes in the order it chooses.
"""

import pathlib
from typing import Any

from absl import flags

from transformer_jax.config import ConfigError
from transformer_jax.patterns import parse as parse_pattern
from transformer_jax.patterns import parse_layers
from transformer_jax.visualize import GALLERY, draw_patterns, require_plots

PICTURES = ("patterns",)


def define_flags(values: flags.FlagValues, argv: list[str]) -> None:
    """Take the picture's name out of the arguments and define its settings.

    Raises:
        ConfigError: no picture is named, or an unknown one.
    """
    name = argv.pop(1) if argv[1:] and not argv[1].startswith("-") else None
    if name not in PICTURES:
        what = f"{name!r} is no picture" if name else "which picture?"
        raise ConfigError(f"{what}: say draw {' or draw '.join(PICTURES)}")
    flags.DEFINE_string("output", "patterns.png", "PNG file.", flag_values=values)
    flags.DEFINE_integer(
        "length", 48, "Queries and keys.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "block", 4, "Positions of a block's side.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_string(
        "patterns", "", 'Patterns, separated by ";".', flag_values=values
    )


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Draw; return where, and the shares of each pattern."""
    require_plots()
    patterns = {title: parse_pattern(text) for title, text in GALLERY.items()}
    if values.patterns:
        try:
            parsed = parse_layers(values.patterns)
        except ValueError as error:
            raise ConfigError(f"--patterns: {error}") from None
        if heads := [pattern for pattern in parsed if pattern.heads]:
            raise ConfigError(f"--patterns: draw the heads one by one, not {heads[0]}")
        patterns = {f"{n}": pattern for n, pattern in enumerate(parsed, 1)}
    path = pathlib.Path(values.output)
    try:
        shares = draw_patterns(patterns, path, length=values.length, block=values.block)
    except OSError as error:
        raise ConfigError(
            f"--output {path} cannot be written: {error.strerror}"
        ) from error
    return {"output": str(path), "patterns": shares}
