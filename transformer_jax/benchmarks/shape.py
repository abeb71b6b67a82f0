"""What benchmarks of models share: the model's shape, its vocabulary, drawn sources."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.models import build_model, init_variables
from transformer_jax.types import PyTree


def setting(default: Any, help: str, **rule: Any) -> Any:
    """A field that is a flag; `low` is its least value, `choices` are legal entries."""
    return dataclasses.field(default=default, metadata={"help": help, **rule})


@dataclasses.dataclass(frozen=True)
class Shape:
    """Settings of every benchmark of a model; each field is a flag."""

    width: int = setting(512, "Model width D.")
    heads: int = setting(8, "Attention heads.")
    feed_forward: int = setting(2048, "Width of the feed-forward layers.")
    vocabulary: int = setting(8000, "Symbols that both languages share.", low=3)
    source_length: int = setting(32, "Symbols of the longest source.")
    target_length: int = setting(32, "Tokens of the longest target.")
    rounds: int = setting(5, "Rounds; in each, every system is measured in turn.")
    pause: float = setting(
        0.3, "Seconds of rest before each turn, for threads of others to sleep.", low=0
    )
    seed: int = setting(0, "Seed of weights and data.", low=0)

    def __post_init__(self) -> None:
        check_settings(self)
        self.model_config(1, 1)  # Its own checks.

    def model_config(
        self, encoder_layers: int, decoder_layers: int, dropout: float = 0.0
    ) -> ModelConfig:
        """Return the model that a MarianMT of this shape is: post norm, one embedding.

        Its vocabulary holds PAD as well.
        """
        return ModelConfig(
            source_vocab=self.vocabulary + 1,
            target_vocab=self.vocabulary + 1,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            width=self.width,
            heads=self.heads,
            feed_forward=self.feed_forward,
            norm_position="post",
            tied_embeddings="all",
            dropout=dropout,
        )

    def symbols(self) -> "Symbols":
        """Return the special symbols, laid out as Marian does."""
        return Symbols(end_id=0, unk_id=1, pad_id=self.vocabulary)


class Symbols(NamedTuple):
    """Ids of the special symbols; PAD begins an output, its embedding is zero."""

    end_id: int
    unk_id: int
    pad_id: int

    @property
    def bos_id(self) -> int:
        """What begins an output."""
        return self.pad_id


def check_settings(settings: Any) -> None:
    """Check every field of a record of settings.

    Raises:
        ConfigError: one does not keep its rule.
    """
    for item in dataclasses.fields(settings):
        _check(item, getattr(settings, item.name))


def _check(item: dataclasses.Field, value: Any) -> None:
    """Raise ConfigError unless a setting keeps its rule."""
    entries = value if isinstance(value, tuple) else (value,)
    name, rule = f"--{item.name}", item.metadata
    if not entries or len(set(entries)) < len(entries):
        raise ConfigError(f"{name} must name something, and nothing twice: {value}")
    for entry in entries:
        if choices := rule.get("choices"):
            if entry not in choices:
                raise ConfigError(f"{name} knows {', '.join(choices)}, not {entry!r}")
        elif not isinstance(entry, str) and not entry >= rule.get("low", 1):
            raise ConfigError(
                f"{name} must be at least {rule.get('low', 1)}, not {entry}"
            )


def parse_depth(text: str) -> tuple[int, int]:
    """Read "6-6": layers of the encoder and of the decoder.

    Raises:
        ConfigError: it is no such text.
    """
    encoder, _, decoder = text.partition("-")
    if not (
        encoder.isdecimal() and decoder.isdecimal() and int(encoder) * int(decoder)
    ):
        raise ConfigError(f"a depth is written 6-6 (encoder-decoder), not {text!r}")
    return int(encoder), int(decoder)


def draw_params(config: ModelConfig, symbols: Symbols, seed: int) -> PyTree:
    """Return weights drawn by chance; PAD is embedded as zero.

    What sublayers add is scaled by 1 / sqrt(sublayers), as at the start of GPT-2's
    training (Radford et al. 2019, section 2.3): states of deep stacks still know their
    place then, as those of a trained model do.
    """
    model = build_model(config)

    def draw() -> PyTree:
        params = nn.unbox(init_variables(model, jax.random.key(seed))["params"])
        table = params["source_frontend"]["embedding"]["embedding"]
        params["source_frontend"]["embedding"]["embedding"] = table.at[
            symbols.pad_id
        ].set(0.0)
        for side in ("encoder", "decoder"):
            params[side] = _scaled(params[side])
        return params

    return jax.jit(draw)()


def _scaled(stack: PyTree) -> PyTree:
    """Scale the last kernel of every sublayer of a stack."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(stack)]
    last = {path for path in paths if _is_last_kernel(path)}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * len(last) ** -0.5 if path in last else leaf, stack
    )


def _is_last_kernel(path: tuple) -> bool:
    *_, module, name = (part.key for part in path)
    return name == "kernel" and module in ("out", "DenseGeneral_1")


class Sources(NamedTuple):
    """Sources of a call: int32 `[B, S]`, PAD from int32 `[B]` lengths on."""

    ids: np.ndarray
    lengths: np.ndarray


def draw_sources(shape: Shape, rows: int, number: int, *, varied: bool) -> Sources:
    """Draw the sources of round `number`; fewer rows are the first ones of more.

    Lengths are `source_length`, or if `varied` anything from half of it.
    """
    symbols, length = shape.symbols(), shape.source_length
    ids_rng, lengths_rng = (
        np.random.default_rng((shape.seed, number, which)) for which in range(2)
    )
    low = symbols.unk_id + 1
    ids = ids_rng.integers(low, symbols.pad_id, (rows, length), np.int32)
    lengths = np.full(rows, length, np.int32)
    if varied:
        lengths = lengths_rng.integers(max(1, length // 2), length + 1, rows, np.int32)
    ids[np.arange(length) >= lengths[:, None]] = symbols.pad_id
    return Sources(ids, lengths)
