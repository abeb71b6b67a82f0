"""Whole models, built from a `ModelConfig`."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from transformer_jax.attention import Attention, parse_layers
from transformer_jax.attention.arguments import check_kv_heads
from transformer_jax.classifier import Classifier
from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.decoder import Decoder
from transformer_jax.encoder import Encoder
from transformer_jax.frontends import TokenFrontend
from transformer_jax.parallel_models import ParallelSeq2Seq
from transformer_jax.patterns.base import check_head_count
from transformer_jax.projections import make_projection
from transformer_jax.types import EMBED, VOCAB, PyTree


class Memory(NamedTuple):
    """What a decoder reads of a source.

    Attributes:
        projected: what every decoder layer reads; every leaf begins with B.
        lengths: int32 `[B]`.
    """

    projected: PyTree
    lengths: jax.Array


class Seq2Seq(nn.Module):
    """The encoder-decoder Transformer (Vaswani et al. 2017).

    With one front end for both sides, source and target share their embeddings; without
    `output`, the target's embedding matrix is the output layer as well.
    """

    source_frontend: nn.Module
    target_frontend: nn.Module
    encoder: nn.Module
    decoder: nn.Module
    output: nn.Module | None = None

    def __call__(
        self, source: jax.Array, source_lengths: jax.Array, target_inputs: jax.Array
    ) -> jax.Array:
        """Return logits `[B, T, V]` of a teacher-forced pass.

        Args:
            source: int32 `[B, S]`, padding on the right.
            source_lengths: int32 `[B]`; what stands behind changes nothing.
            target_inputs: int32 `[B, T]`, BOS first; row t sees inputs up to t.
        """
        memory = self.encode(source, source_lengths)
        return self.predict(memory, source_lengths, target_inputs)

    def encode(self, source: jax.Array, source_lengths: jax.Array) -> jax.Array:
        """Return the memory `[B, S, D]` of a source `[B, S]`."""
        return self.encoder(self.source_frontend(source), source_lengths)

    def predict(
        self,
        memory: jax.Array,
        source_lengths: jax.Array,
        target_inputs: jax.Array,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits `[B, T, V]` of target inputs `[B, T]`, given `encode`'s memory.

        Row t sees inputs up to t. No later row changes it, so `lengths` `[B]` of the
        inputs are needed only where attention keeps what it has seen.
        """
        x = self.target_frontend(target_inputs)
        return self._logits(self.decoder(x, memory, source_lengths, lengths))

    def read(self, source: jax.Array, source_lengths: jax.Array) -> Memory:
        """Encode a source and project it for every decoder layer, once."""
        memory = self.encode(source, source_lengths)
        return Memory(self.decoder.project(memory, source_lengths), source_lengths)

    def step(
        self, tokens: jax.Array, cache: PyTree, memory: Memory
    ) -> tuple[jax.Array, PyTree]:
        """Return logits `[M, V]` of the next place and the cache with this one.

        Args:
            tokens: int32 `[M]`, M a multiple of the memory's B: a row's beams adjacent.
            cache: from `init_cache(M, max_length)` or the step before.
            memory: from `read`.
        """
        position, layers = cache
        x = self.target_frontend.at(tokens[:, None], position[:, None])
        x, layers = self.decoder.step(x, layers, memory.projected)
        return self._logits(x)[:, 0], (position + 1, layers)

    def init_cache(self, batch: int, max_length: int) -> PyTree:
        """Return an empty cache for `step`; every leaf begins with `batch`."""
        layers = self.decoder.init_cache(batch, max_length)
        return jnp.zeros(batch, jnp.int32), layers

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.output is None:
            return self.target_frontend.logits(x)
        return self.output(x)


class Canvas(NamedTuple):
    """What a model that writes all places at once has.

    Attributes:
        length: it predicts the output's length; else its canvas follows the source's.
        blank: the blank of CTC is an output.
    """

    length: bool
    blank: bool


# The objectives whose models write all places at once.
CANVASES = {
    "parallel": Canvas(length=True, blank=False),
    "overgenerate": Canvas(length=False, blank=False),
    "mask_predict": Canvas(length=True, blank=False),
    "ctc": Canvas(length=False, blank=True),
}


def build_model(
    config: ModelConfig, objective: str = "autoregressive"
) -> Seq2Seq | ParallelSeq2Seq | Classifier:
    """Return the model that a configuration with known vocabulary sizes describes.

    Args:
        config: its settings.
        objective: what it is trained for: "autoregressive", "classification", or a key
            of `CANVASES`.

    Raises:
        ConfigError: a vocabulary size is unknown, two sizes differ that must not, or a
            text of attention does not fit (`read_attention`).
    """
    _check_vocabularies(config)
    canvas = CANVASES.get(objective)
    dtype = jnp.dtype(config.dtype)
    if objective == "classification":
        return Classifier(
            _token_frontend(config, config.source_vocab, dtype),
            _encoder(config, None, dtype),
            make_projection(config.target_vocab, (EMBED, VOCAB), dtype=dtype),
            config.pooling,
        )
    outputs = config.target_vocab + (canvas is not None and canvas.blank)
    # The symbol of an empty place comes last.
    symbols = outputs + (canvas is not None)
    target = _token_frontend(config, symbols, dtype)
    source = target
    if config.tied_embeddings != "all":
        source = _token_frontend(config, config.source_vocab, dtype)
    output = None
    if config.tied_embeddings == "none":
        output = make_projection(outputs, (EMBED, VOCAB), dtype=dtype)
    parts = {
        "source_frontend": source,
        "target_frontend": target,
        "encoder": _encoder(config, canvas, dtype),
        "decoder": _decoder(config, canvas, dtype),
        "output": output,
    }
    if canvas is None:
        return Seq2Seq(**parts)
    return ParallelSeq2Seq(
        **parts,
        inputs=config.decoder_inputs,
        length_from=config.length_from if canvas.length else "",
        length_classes=config.length_classes,
        length_offset=config.length_target == "offset",
        upsample=config.upsample,
        extra_slots=config.extra_slots,
    )


def init_variables(model: nn.Module, key: jax.Array) -> PyTree:
    """Return the initial variables of a model of `build_model`, boxed."""
    tokens, lengths = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
    inputs = () if isinstance(model, Classifier) else (tokens,)
    return model.init(key, tokens, lengths, *inputs)


def _check_vocabularies(config: ModelConfig) -> None:
    """Refuse sizes that are unknown, or differ where one table serves both sides."""
    if not config.source_vocab or not config.target_vocab:
        raise ConfigError(
            "model.source_vocab and model.target_vocab are unknown: set them, or let "
            "the vocabulary do so"
        )
    shared = config.tied_embeddings == "all"
    if shared and config.source_vocab != config.target_vocab:
        raise ConfigError(
            f"model.tied_embeddings=all wants one vocabulary, but the source has "
            f"{config.source_vocab} symbols and the target {config.target_vocab}: use "
            "model.tied_embeddings=target"
        )


def _encoder(config: ModelConfig, canvas: Canvas | None, dtype: Any) -> Encoder:
    """The encoder; the token that tells the length is its first extra one."""
    extra = config.extra_global_tokens
    if canvas is not None and canvas.length and config.length_from == "token":
        extra += 1
    return Encoder(
        _block_fields(config, dtype) | {"extra": extra},
        config.encoder_layers,
        variants=_variants(config, kind="encoder_attention"),
        scan=config.scan_layers,
        remat=config.remat,
    )


def _decoder(config: ModelConfig, canvas: Canvas | None, dtype: Any) -> Decoder:
    """The decoder, causal unless it has a canvas."""
    return Decoder(
        _block_fields(config, dtype) | {"causal": canvas is None},
        config.decoder_layers,
        variants=_variants(
            config, kind="decoder_attention", cross_kind="cross_attention"
        ),
        scan=config.scan_layers,
        remat=config.remat,
    )


def read_attention(config: ModelConfig, field: str) -> tuple[Attention, ...]:
    """Return the kinds of attention that a field of the configuration tells, in turn.

    Raises:
        ConfigError: it does not parse, a pattern is one of more or fewer heads than
            there are, or there are more kinds than layers.
    """
    try:
        kinds = parse_layers(getattr(config, field))
        for pattern in (kind.pattern for kind in kinds if kind.pattern is not None):
            check_head_count(pattern, config.heads)
            check_kv_heads(pattern, config.kv_heads or config.heads)
    except ValueError as error:
        raise ConfigError(f"model.{field}: {error}") from None
    tower = "encoder" if field == "encoder_attention" else "decoder"
    layers = getattr(config, f"{tower}_layers")
    if len(kinds) > layers:
        raise ConfigError(
            f"model.{field} has {len(kinds)} kinds of attention, but "
            f"model.{tower}_layers is {layers}: leave some out"
        )
    return kinds


def _variants(config: ModelConfig, **fields: str) -> tuple[FrozenDict, ...]:
    """What changes from layer to layer: fields of a block, after settings."""
    of_fields = {name: read_attention(config, field) for name, field in fields.items()}
    turn = math.lcm(*map(len, of_fields.values()))
    return tuple(
        FrozenDict({name: each[n % len(each)] for name, each in of_fields.items()})
        for n in range(turn)
    )


def _token_frontend(config: ModelConfig, vocab: int, dtype: Any) -> TokenFrontend:
    return TokenFrontend(
        vocab,
        config.width,
        config.positions,
        config.max_positions,
        config.scale_embeddings,
        config.dropout,
        dtype,
    )


def _block_fields(config: ModelConfig, dtype: Any) -> dict[str, Any]:
    return {
        "width": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads or config.heads,
        "head_width": config.head_width or config.width // config.heads,
        "hidden": config.feed_forward,
        "activation": config.activation,
        "norm": config.norm,
        "norm_position": config.norm_position,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "positions": config.positions,
        "places": config.max_positions,
        "dtype": dtype,
    }
