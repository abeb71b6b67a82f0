"""Static attention patterns: one object is mask, oracle, picture and cost.

A pattern is a frozen, hashable value without shapes: pass it as a static argument, put
its text into a configuration.
"""

from transformer_jax.patterns.base import Pattern, per_head
from transformer_jax.patterns.constructors import (
    PATTERNS,
    causal,
    chunked,
    fixed,
    full,
    global_tokens,
    local,
    random_blocks,
    rule,
    strided,
)
from transformer_jax.patterns.text import parse, parse_layers

__all__ = [
    "PATTERNS",
    "Pattern",
    "causal",
    "chunked",
    "fixed",
    "full",
    "global_tokens",
    "local",
    "parse",
    "parse_layers",
    "per_head",
    "random_blocks",
    "rule",
    "strided",
]
