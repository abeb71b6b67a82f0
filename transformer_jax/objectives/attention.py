"""What each attention of a model must be able to do, checked before data is read."""

import functools

import numpy as np

from transformer_jax.attention import ATTENTION, Attention
from transformer_jax.attention.reach import first_edges
from transformer_jax.attention.text import SOFTMAX
from transformer_jax.config import Config, ConfigError
from transformer_jax.models import CANVASES, read_attention
from transformer_jax.patterns import Pattern, causal, full


def longest_of(config: Config) -> tuple[int, int]:
    """Return the longest source and the longest target that a decoder sees."""
    longest = config.data.bucket_lengths[-1]
    source = max(longest, config.decode.max_source_length)
    target = max(longest, config.decode.max_length)
    canvas = CANVASES.get(config.train.objective)
    if canvas is not None and not canvas.length:
        target = config.model.upsample * source + config.model.extra_slots
    return source, target


def check_attention(config: Config, source: int, target: int) -> None:
    """Refuse attention that cannot do what its place in the model asks of it.

    Args:
        config: names the kinds in `model.encoder_attention`, `model.decoder_attention`
            and `model.cross_attention`.
        source, target: from `longest_of`.

    Raises:
        ConfigError: a text does not parse; a kind lacks a capability, is too short for
            the longest sequence, or leaves a place nothing to attend to.
    """
    # The token before a sequence that is classified is a place of it.
    encoded = source + (config.model.pooling == "cls")
    sides = {"encoder_attention": (encoded, encoded)}
    if config.train.objective != "classification":
        sides["decoder_attention"] = (target, target)
        sides["cross_attention"] = (target, source)
    for field, places in sides.items():
        for kind in read_attention(config.model, field):
            _check_capabilities(kind, field, _needs(config, field))
            _check_places(kind, field, config.model.max_positions, *places)
            if kind.kind == SOFTMAX:
                _check_pattern(_edges(kind), field, config, *places)


def _needs(config: Config, field: str) -> dict[str, str]:
    """Capabilities that a field's attention needs, and what for."""
    model, needs = config.model, {}
    autoregressive = config.train.objective not in CANVASES
    decoder = f"the decoder of train.objective {config.train.objective!r}"
    if field == "cross_attention":
        needs["cross"] = "cross-attention compares two sequences"
        if autoregressive:
            needs["memory"] = f"{decoder} reads a source that is projected once"
    elif model.positions in ("alibi", "t5"):
        needs["bias"] = f"model.positions={model.positions} is a bias of the scores"
    if field == "decoder_attention" and autoregressive:
        needs["causal"] = f"{decoder} must not look ahead"
        needs["decode"] = f"{decoder} writes place after place"
    if field == "encoder_attention" and model.extra_global_tokens:
        needs["residual"] = "model.extra_global_tokens are attended apart"
    elif field == "encoder_attention" and _tells_length(config):
        needs["residual"] = "the token of model.length_from=token is attended apart"
    if model.attention_dropout:
        needs["dropout"] = "model.attention_dropout drops weights"
    if model.kv_heads not in (0, model.heads):
        needs["gqa"] = "model.kv_heads is less than model.heads"
    return needs


def _tells_length(config: Config) -> bool:
    """Tell whether an extra token of the encoder predicts the length."""
    canvas = CANVASES.get(config.train.objective)
    return canvas is not None and canvas.length and config.model.length_from == "token"


def _check_capabilities(kind: Attention, field: str, needs: dict[str, str]) -> None:
    """Refuse a kind that lacks a capability, and name those that have all."""
    lacking = next((need for need in needs if need not in kind.row.capabilities), None)
    if lacking is None:
        return
    able = [
        "a pattern" if name == SOFTMAX else name
        for name, row in ATTENTION.items()
        if needs.keys() <= row.capabilities
    ]
    raise ConfigError(
        f"model.{field} {str(kind)!r} lacks {lacking!r}, but {needs[lacking]}: use "
        f"{' or '.join(able)}"
    )


def _check_places(
    kind: Attention, field: str, places: int, rows: int, columns: int
) -> None:
    """Refuse sequences longer than what a kind has a row per position for."""
    by_place = {piece.by_place for piece in kind.row.pieces}
    longest = max(rows if "both" in by_place else 0, columns)
    if by_place - {""} and longest > places:
        raise ConfigError(
            f"model.{field} {str(kind)!r} is for sequences of up to "
            f"model.max_positions={places}, but they go to {longest}: raise "
            "model.max_positions, or lower data.bucket_lengths, decode.max_length and "
            "decode.max_source_length"
        )


def _edges(kind: Attention) -> Pattern:
    return full() if kind.pattern is None else kind.pattern


def _check_pattern(
    pattern: Pattern, field: str, config: Config, rows: int, columns: int
) -> None:
    """Refuse patterns that look the wrong way, or leave a place nothing."""
    if field == "decoder_attention":
        bidirectional = config.train.objective in CANVASES
        if bidirectional and pattern.is_causal:
            raise ConfigError(
                f"model.{field} {str(pattern)!r} is causal, but the decoder of "
                f"train.objective {config.train.objective!r} reads both sides of a "
                "place: use one that reaches ahead"
            )
        pattern = pattern if bidirectional else pattern & causal()
    heads = range(pattern.heads or 1)
    # A head may be silent at a place where another is not.
    of_heads = (first_edges(pattern.of_head(n), rows, columns, 0) for n in heads)
    first = functools.reduce(np.minimum, (keys for keys, _ in of_heads))
    if (dead := np.flatnonzero(first == columns)).size:
        raise ConfigError(
            f"model.{field} {str(pattern)!r} leaves place {dead[0]} nothing to attend: "
            "join another pattern to it by |"
        )
