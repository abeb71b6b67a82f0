"""The configuration: frozen records, checked for types and ranges.

A config file returns an `ml_collections.ConfigDict` made by `default_config()`, so
every field can be overridden by a flag (`--config.model.width=512`) and a misspelt one
is refused. `from_config_dict` turns it into the records below.
"""

import dataclasses
import itertools
import math
import pathlib
import runpy
from typing import Any

import ml_collections

# The longest sequences, so that a slip of the finger does not ask for all memory.
MOST_PLACES = 2**16


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field and the remedy."""


def remedy(extra: str) -> str:
    """Return the command that installs what an optional feature needs."""
    return (
        f'pip install "transformer-jax[{extra}]" (in a checkout: pip install -e '
        f'".[{extra}]")'
    )


def _field(default: Any, **rule: Any) -> Any:
    """A field with its check: `low` and `high` are inclusive, `choices` are legal."""
    return dataclasses.field(default=default, metadata=rule)


@dataclasses.dataclass(frozen=True)
class _Checked:
    """Checks every field against its type and its rule when the record is made."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for item in dataclasses.fields(self):
            _check(f"{section}.{item.name}", getattr(self, item.name), item)


def _check(name: str, value: Any, item: dataclasses.Field) -> None:
    """Raise ConfigError unless `value` has the default's type and keeps the rule."""
    wanted = type(item.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(
            f"{name} must be {wanted.__name__}, not {type(value).__name__} {value!r}"
        )
    if wanted is float and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite, not {value}")
    low, high = item.metadata.get("low"), item.metadata.get("high")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(f"{name} must be {limits}, not {value}")
    choices = item.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


@dataclasses.dataclass(frozen=True)
class ModelConfig(_Checked):
    """An encoder-decoder Transformer (Vaswani et al. 2017) and its usual variations.

    A vocabulary size of 0 means "as the vocabulary has"; `kv_heads` 0 means `heads`;
    `head_width` 0 means `width // heads`.
    """

    source_vocab: int = _field(0, low=0)
    target_vocab: int = _field(0, low=0)
    encoder_layers: int = _field(3, low=1)
    decoder_layers: int = _field(3, low=1)
    width: int = _field(256, low=1)
    heads: int = _field(4, low=1)
    kv_heads: int = _field(0, low=0)
    head_width: int = _field(0, low=0)
    feed_forward: int = _field(1024, low=1)
    activation: str = _field("relu", choices=("relu", "gelu", "swiglu"))
    norm: str = _field("layer", choices=("layer", "rms"))
    norm_position: str = _field("pre", choices=("pre", "post"))
    # How a place is known: by a vector added to embeddings (sinusoidal, learned,
    # one_hot), by turning queries and keys (rotary), by a bias of the scores (alibi,
    # t5), or not at all.
    positions: str = _field(
        "sinusoidal",
        choices=("sinusoidal", "learned", "one_hot", "rotary", "alibi", "t5", "none"),
    )
    # Places that learned and one_hot positions have, and kinds of attention that learn
    # or draw a row per position; the others have no end.
    max_positions: int = _field(512, low=1)
    # Which embedding matrices are one: target input and output, or source as well.
    tied_embeddings: str = _field("target", choices=("none", "target", "all"))
    scale_embeddings: bool = True
    # A kind of attention, such as linear(), or a pattern, which says what edges softmax
    # attention has; or several separated by ";", one a layer in turn. A decoder's is
    # made causal.
    encoder_attention: str = "full()"
    decoder_attention: str = "full()"
    cross_attention: str = "full()"
    # Learned tokens before the source that attend all and that all attend.
    extra_global_tokens: int = _field(0, low=0)
    # Of classification: the mean of all places, or the state of a token before them.
    pooling: str = _field("mean", choices=("mean", "cls"))
    # Of models that write all places at once. What an empty place reads: a vector of
    # its own (mask), or the source's states, spread evenly (uniform_copy) or by
    # distance (soft_copy).
    decoder_inputs: str = _field(
        "uniform_copy", choices=("mask", "uniform_copy", "soft_copy")
    )
    # What predicts an output's length: the mean of the source's states (pooled) or an
    # extra token of the encoder; as a difference to the source's length (offset) or as
    # it is; and how many lengths are told apart.
    length_from: str = _field("pooled", choices=("pooled", "token"))
    length_target: str = _field("offset", choices=("offset", "absolute"))
    length_classes: int = _field(64, low=2, high=2 * MOST_PLACES)
    # Places of a canvas whose length is not predicted: upsample |x| + extra_slots.
    upsample: int = _field(3, low=1)
    extra_slots: int = _field(0, low=0)
    dropout: float = _field(0.1, low=0.0, high=0.99)
    attention_dropout: float = _field(0.0, low=0.0, high=0.99)
    # What the backward pass recomputes: nothing, all but matrix products, all.
    remat: str = _field("none", choices=("none", "dots", "full"))
    scan_layers: bool = False
    dtype: str = _field("float32", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_width and self.width % self.heads:
            raise ConfigError(
                f"model.width {self.width} is no multiple of model.heads {self.heads}: "
                "change one, or set model.head_width"
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads {self.heads} is no multiple of model.kv_heads "
                f"{self.kv_heads}: change one"
            )
        if self.positions == "sinusoidal" and self.width % 2:
            raise ConfigError(
                f"model.width {self.width} is odd, but sinusoidal positions pair sines "
                "with cosines: use an even width"
            )
        head_width = self.head_width or self.width // self.heads
        if self.positions == "rotary" and head_width % 2:
            raise ConfigError(
                "model.positions=rotary turns pairs of features, but the head width "
                f"(model.head_width, or model.width / model.heads) is {head_width}: "
                "make it even"
            )

    @property
    def longest(self) -> int | None:
        """The most places a sequence can have; None where there is no such limit."""
        return self.max_positions if self.positions in ("learned", "one_hot") else None


@dataclasses.dataclass(frozen=True)
class DataConfig(_Checked):
    """Where examples come from and how they are batched.

    `directory` is where data sets are prepared; empty means the user's cache folder.
    """

    source: str = "cmudict"
    directory: str = ""
    # Folder of `distill`, whose outputs take the place of the training split's
    # references, or stand beside them.
    distilled: str = ""
    keep_raw: bool = False
    # Padded places a batch may hold, source and target each.
    tokens_per_batch: int = _field(4096, low=1)
    # Padded lengths: a pair goes to the first bucket that holds both its sides.
    bucket_lengths: tuple = (8, 12, 16, 32)
    # What a row of a batch is: a source with one of its references (each), or with all,
    # of which any is right.
    references: str = _field("each", choices=("each", "all"))
    seed: int = _field(0, low=0, high=2**32 - 1)
    prefetch: int = _field(2, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.bucket_lengths
        whole = all(type(length) is int for length in lengths)
        if not (lengths and whole) or not all(
            a < b for a, b in itertools.pairwise(lengths)
        ):
            raise ConfigError(
                f"data.bucket_lengths must be rising integers, not {lengths}"
            )
        if lengths[0] < 2 or lengths[-1] > self.tokens_per_batch:
            raise ConfigError(
                f"data.bucket_lengths {lengths} must lie between 2 and "
                f"data.tokens_per_batch {self.tokens_per_batch}"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Checked):
    """Optimisation, logging, evaluation and checkpoints; all counts are in steps."""

    objective: str = "autoregressive"
    steps: int = _field(1000, low=1)
    seed: int = _field(0, low=0, high=2**32 - 1)
    optimizer: str = _field("adamw", choices=("adamw", "adafactor", "sgd"))
    learning_rate: float = _field(1e-3, low=0.0)
    schedule: str = _field("rsqrt", choices=("rsqrt", "cosine", "constant"))
    warmup: int = _field(100, low=0)
    beta1: float = _field(0.9, low=0.0, high=1.0)
    beta2: float = _field(0.98, low=0.0, high=1.0)
    weight_decay: float = _field(0.0, low=0.0)
    momentum: float = _field(0.9, low=0.0, high=1.0)
    # Largest global norm of the gradient; 0 means no clipping.
    clip: float = _field(1.0, low=0.0)
    label_smoothing: float = _field(0.1, low=0.0, high=0.99)
    # Of parallel and mask_predict: what the length's loss counts beside the tokens'.
    length_weight: float = _field(0.1, low=0.0)
    # Of overgenerate: what a place behind the end counts beside the others.
    fill_weight: float = _field(0.1, low=0.0, high=1.0)
    # Wrong answers among the decoder's inputs, or right ones; see corruption.py.
    corruption: str = _field(
        "none",
        choices=("none", "scheduled_sampling", "random_replacement", "glancing"),
    )
    corruption_choice: str = _field("argmax", choices=("argmax", "sample"))
    # Share of right inputs: from `keep_start` a decay over about k = `keep_scale` steps
    # (inverse_sigmoid is at one half after k ln k), down to the floor.
    keep_start: float = _field(1.0, low=0.0, high=1.0)
    keep_schedule: str = _field(
        "linear", choices=("constant", "linear", "exponential", "inverse_sigmoid")
    )
    keep_scale: int = _field(1000, low=1)
    keep_floor: float = _field(0.5, low=0.0, high=1.0)
    # Decay of the moving average of the parameters; 0 keeps none.
    ema_decay: float = _field(0.0, low=0.0, high=0.999999)
    # Micro-batches a step is cut into; sums are divided once.
    accumulation: int = _field(1, low=1)
    log_every: int = _field(50, low=1)
    evaluate_every: int = _field(500, low=1)
    save_every: int = _field(500, low=1)
    keep_latest: int = _field(2, low=1)
    # Of the checkpoints with a validation loss.
    keep_best: int = _field(1, low=1)
    # Keep every k-th step for good; 0 means none.
    keep_every: int = _field(0, low=0)
    # Write event files for TensorBoard beside metrics.jsonl.
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class DecodeConfig(_Checked):
    """How a trained model turns sources into outputs."""

    # "auto" is the first one that decodes the objective.
    strategy: str = "auto"
    # Of beam_search and ctc_beam_search.
    beam_size: int = _field(4, low=1, high=1024)
    # Of beam_search; the penalty divides sums of log-probabilities.
    penalty: str = _field("gnmt", choices=("none", "average", "gnmt"))
    alpha: float = _field(0.6, low=0.0, high=5.0)
    # Of sample; top_k 0 and top_p 1 cut nothing.
    temperature: float = _field(1.0, low=1e-3, high=1e3)
    top_k: int = _field(0, low=0)
    top_p: float = _field(1.0, low=1e-6, high=1.0)
    seed: int = _field(0, low=0, high=2**32 - 1)
    # Of strategies that write all places at once: how many lengths are tried, or ends;
    # the working directory of an autoregressive model that chooses among them; and how
    # often mask_predict writes.
    length_beam: int = _field(1, low=1, high=1024)
    rescorer: str = ""
    passes: int = _field(10, low=1, high=1024)
    # Symbols that no output may hold, and how many it holds at least.
    forbidden: tuple = ()
    min_length: int = _field(0, low=0)
    # Decode with the moving average of the parameters (`train.ema_decay`). The best
    # checkpoint is still the one whose plain parameters have the lowest loss.
    use_ema: bool = False
    # Longest output; END is counted where the strategy writes one. The cache is that
    # long, so its size has an end.
    max_length: int = _field(32, low=1, high=MOST_PLACES)
    # Longest source; a longer one is refused as INVALID.
    max_source_length: int = _field(32, low=1, high=MOST_PLACES)
    rows: int = _field(256, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(type(symbol) is str for symbol in self.forbidden):
            raise ConfigError(
                "decode.forbidden must be symbols in quotes, such as ('A',), not "
                f"{self.forbidden}"
            )


@dataclasses.dataclass(frozen=True)
class ParallelConfig(_Checked):
    """The device mesh: sizes of its axes; -1 takes the devices that are left."""

    data: int = _field(-1, low=-1)


@dataclasses.dataclass(frozen=True)
class Config:
    """All of a run's settings."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)


SECTIONS = {item.name: item.default_factory for item in dataclasses.fields(Config)}


def default_config() -> ml_collections.ConfigDict:
    """Return every setting at its default, to be changed by a config file."""
    return ml_collections.ConfigDict(to_dict(Config())).lock()


def config_beside(path: str, name: str) -> ml_collections.ConfigDict:
    """Return the settings of another config file, for a file that changes a few.

    Args:
        path: the `__file__` of the one.
        name: of the other, in the same folder, which is no package.
    """
    other = pathlib.Path(path).with_name(name)
    return runpy.run_path(str(other))["get_config"]()


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Return the settings as plain nested dictionaries, ready for JSON."""
    return dataclasses.asdict(config)


def from_config_dict(settings: Any) -> Config:
    """Build the checked records from nested mappings of settings.

    Missing fields take their defaults, so a working directory written by an older
    version still opens.

    Args:
        settings: `ConfigDict` or dictionary, section -> field -> value.

    Raises:
        ConfigError: a section or field is unknown, or a value has the wrong type or
            lies outside its range.
    """
    sections = {}
    for name, values in dict(settings).items():
        if name not in SECTIONS:
            raise ConfigError(
                f"unknown section {name!r}: the sections are {', '.join(SECTIONS)}"
            )
        known = {item.name for item in dataclasses.fields(SECTIONS[name])}
        if unknown := sorted(set(values) - known):
            raise ConfigError(
                f"unknown field {name}.{unknown[0]}: {name} has "
                f"{', '.join(sorted(known))}"
            )
        fields = {key: _plain(value) for key, value in values.items()}
        sections[name] = SECTIONS[name](**fields)
    return Config(**sections)


def _plain(value: Any) -> Any:
    """JSON and ConfigDict give lists; the frozen records hold tuples."""
    return tuple(value) if isinstance(value, list | tuple) else value
