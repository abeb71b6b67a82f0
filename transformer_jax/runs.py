"""A run: a working directory with its configuration, vocabularies and model."""

import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Collection, Iterator
from typing import Any

import flax
import jax
from etils import epath

import transformer_jax
from transformer_jax import objectives
from transformer_jax.checkpoints import Checkpoints, Restored
from transformer_jax.config import (
    Config,
    ConfigError,
    ModelConfig,
    from_config_dict,
    to_dict,
)
from transformer_jax.data import (
    SOURCES,
    InvalidText,
    Source,
    TokenCache,
    Tokenizer,
    Vocabulary,
    build_vocabulary,
    data_directory,
    make_tokenizer,
    open_cache,
)
from transformer_jax.models import Seq2Seq, build_model
from transformer_jax.run_directory import (
    config_changes,
    refuse_changes,
    require_writable,
    write_json,
)

CONFIG_FILE = "config.json"
SIDES = ("source", "target")


@dataclasses.dataclass(frozen=True)
class Run:
    """What training and decoding share.

    Attributes:
        workdir: the working directory.
        config: resolved: `config.model` has the vocabularies' sizes.
        source_tokenizer: reads sources.
        target_tokenizer: reads references, writes outputs.
    """

    workdir: epath.Path
    config: Config
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    @property
    def source(self) -> Source:
        """The row of SOURCES that the run is trained on.

        Raises:
            ConfigError: there is no such row.
        """
        return find_source(self.config)

    @property
    def vocabulary_hash(self) -> str:
        """Both vocabularies' hashes."""
        tokenizers = (self.source_tokenizer, self.target_tokenizer)
        return "-".join(each.vocabulary.hash() for each in tokenizers)

    def model(self) -> Seq2Seq:
        """Return the model, without parameters."""
        return build_model(self.config.model)

    def cache(self, split: str) -> TokenCache:
        """Return the token ids of a split, prepared when they are missing.

        Raises:
            ConfigError: the data cannot be read, or not with the run's vocabulary.
        """
        directory = data_directory(self.config.data.directory)

        def examples() -> Any:
            return self.source.examples(str(directory), split)

        try:
            with _usable(directory):
                return open_cache(
                    directory / "tokens",
                    name=self.config.data.source,
                    split=split,
                    examples=examples,
                    source_tokenizer=self.source_tokenizer,
                    target_tokenizer=self.target_tokenizer,
                )
        except InvalidText as error:
            raise ConfigError(
                f"{self.workdir / 'vocabulary'} does not fit the data: {error}: "
                "restore it, or choose another --workdir"
            ) from error

    def checkpoints(self, *, read_only: bool) -> Checkpoints:
        """Open the run's checkpoints."""
        return Checkpoints(
            self.workdir / "checkpoints",
            keep_latest=self.config.train.keep_latest,
            keep_every=self.config.train.keep_every,
            read_only=read_only,
        )

    def record(self) -> None:
        """Write the configuration down, once nothing of it can be refused any more."""
        write_json(
            self.workdir / CONFIG_FILE,
            {"config": to_dict(self.config), "versions": versions()},
        )

    def require_vocabulary_of(self, restored: Restored) -> None:
        """Refuse a checkpoint that was trained with other vocabularies.

        Raises:
            ConfigError: the hashes differ.
        """
        if restored.metadata["vocabulary"] != self.vocabulary_hash:
            raise ConfigError(
                f"{self.workdir / 'vocabulary'} is not the vocabulary that step "
                f"{restored.step} was trained with: restore it, or choose another "
                "--workdir"
            )


def find_source(config: Config) -> Source:
    """Return the row of SOURCES that a configuration names.

    Raises:
        ConfigError: there is no such row.
    """
    name = config.data.source
    if name not in SOURCES:
        raise ConfigError(
            f"data.source must be one of {', '.join(SOURCES)}, not {name!r}"
        )
    return SOURCES[name]


def create_run(
    config: Config, workdir: str, *, allowed_changes: Collection[str] = ()
) -> Run:
    """Make a working directory for a configuration, or go on in the one there.

    Everything that can be refused is refused before data is read.

    Raises:
        ConfigError: the configuration cannot work, differs from the run in the working
            directory, or the directory cannot be written.
    """
    objectives.validate(config)
    find_source(config)
    path = epath.Path(workdir).expanduser()
    require_writable(path)
    if (path / CONFIG_FILE).exists():
        saved = to_dict(read_config(path))
        saved["model"] |= {f"{side}_vocab": 0 for side in SIDES}
        now = to_dict(config)
        now["model"] |= {f"{side}_vocab": 0 for side in SIDES}
        refuse_changes(saved, now, allowed_changes)
        tokenizers = _load_tokenizers(path)
    else:
        tokenizers = _build_tokenizers(config, path)
    sizes = {
        f"{side}_vocab": tokenizer.vocabulary.size
        for side, tokenizer in zip(SIDES, tokenizers, strict=True)
    }
    config = dataclasses.replace(config, model=_fitted(config.model, sizes))
    build_model(config.model)
    return Run(path, config, *tokenizers)


def open_run(workdir: str, config: Config | None = None) -> Run:
    """Open the working directory of a trained model.

    Args:
        workdir: folder or `gs://` path.
        config: takes the place of the one in the directory, for flags that override it.

    Raises:
        ConfigError: there is no run, or a file of it is damaged or does not fit.
    """
    path = epath.Path(workdir).expanduser()
    saved = read_config(path)
    config = config or saved
    objectives.validate(config)
    find_source(config)
    _require_same_model(saved, config)
    tokenizers = _load_tokenizers(path)
    for side, tokenizer in zip(SIDES, tokenizers, strict=True):
        wanted = getattr(config.model, f"{side}_vocab")
        found = tokenizer.vocabulary.size
        if wanted != found:
            raise ConfigError(
                f"{path}: the model was built for {wanted} {side} symbols, but "
                f"{path / 'vocabulary' / side}.json has {found}: restore that file"
            )
    return Run(path, config, *tokenizers)


def _require_same_model(saved: Config, now: Config) -> None:
    """Flags may change how a model is used, not what it is; its precision they may."""
    changes = [
        line
        for line in config_changes(to_dict(saved), to_dict(now))
        if line.startswith(("model.", "data.source:")) and "model.dtype:" not in line
    ]
    if changes:
        raise ConfigError(
            f"a trained model cannot be changed ({'; '.join(changes)}): leave that out"
        )


def read_config(workdir: Any) -> Config:
    """Read the configuration in a working directory.

    Raises:
        ConfigError: it is missing or damaged.
    """
    path = epath.Path(workdir).expanduser() / CONFIG_FILE
    try:
        return from_config_dict(json.loads(path.read_text())["config"])
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(
            f"--workdir {workdir} holds no run ({CONFIG_FILE} is missing): train one "
            "there first, or name another directory"
        ) from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it") from error


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "transformer_jax": transformer_jax.__version__,
    }


def _fitted(model: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    for name, size in sizes.items():
        if getattr(model, name) not in (0, size):
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}, but the vocabulary has "
                f"{size} symbols: set it to 0 to take the vocabulary's size"
            )
    return dataclasses.replace(model, **sizes)


@contextlib.contextmanager
def _usable(directory: Any) -> Iterator[None]:
    """Name the data directory in what goes wrong with it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"data.directory {directory} cannot be used ({error}): choose another "
            "one, or mend its permissions or its disk"
        ) from error


def _vocabulary_file(workdir: epath.Path, side: str) -> epath.Path:
    return workdir / "vocabulary" / f"{side}.json"


def _load_tokenizers(workdir: epath.Path) -> list[Tokenizer]:
    tokenizers = []
    for side in SIDES:
        path = _vocabulary_file(workdir, side)
        try:
            tokenizers.append(make_tokenizer(Vocabulary.load(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the vocabulary {path} cannot be read ({error}): restore it"
            ) from error
    return tokenizers


def _build_tokenizers(config: Config, workdir: epath.Path) -> list[Tokenizer]:
    """Collect the symbols of the training split and save them."""
    source = find_source(config)
    directory = data_directory(config.data.directory)
    print(f"reading {config.data.source} in {directory}", file=sys.stderr, flush=True)
    with _usable(directory):
        examples = source.examples(str(directory), "train")
    vocabularies = (
        build_vocabulary(source.source_tokenizer, (each.source for each in examples)),
        build_vocabulary(
            source.target_tokenizer,
            (text for each in examples for text in each.references),
        ),
    )
    (workdir / "vocabulary").mkdir(parents=True, exist_ok=True)
    for side, vocabulary in zip(SIDES, vocabularies, strict=True):
        vocabulary.save(_vocabulary_file(workdir, side))
    return [make_tokenizer(vocabulary) for vocabulary in vocabularies]
