"""A run: a working directory with its configuration, vocabularies and model."""

import dataclasses
import sys
from collections.abc import Collection
from typing import Any

from etils import epath

from transformer_jax import objectives
from transformer_jax.checkpoints import Checkpoints, Restored
from transformer_jax.config import (
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    to_dict,
)
from transformer_jax.data import InvalidText, TokenCache, Tokenizer
from transformer_jax.data.distilled import Distillation
from transformer_jax.models import Seq2Seq, build_model
from transformer_jax.origins import Origin, find_origin
from transformer_jax.parallel_models import ParallelSeq2Seq
from transformer_jax.run_directory import (
    CONFIG_FILE,
    config_changes,
    refuse_changes,
    require_writable,
)
from transformer_jax.saved_config import read_config, read_record, write_config
from transformer_jax.sharding import make_mesh
from transformer_jax.splits import find_source, new_tokenizers, open_split
from transformer_jax.tensorboard import require_tensorboard
from transformer_jax.training import abstract_variables
from transformer_jax.vocabularies import (
    SIDES,
    load_tokenizers,
    save_tokenizers,
    vocabulary_hash,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """What training and decoding share.

    Attributes:
        workdir: the working directory.
        config: resolved: `config.model` has the vocabularies' sizes.
        source_tokenizer: reads sources.
        target_tokenizer: reads references, writes outputs.
        origin: the checkpoint that its first parameters are those of, if any.
    """

    workdir: epath.Path
    config: Config
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    origin: Origin | None = None

    @property
    def vocabulary_hash(self) -> str:
        """Both vocabularies' hashes."""
        return vocabulary_hash((self.source_tokenizer, self.target_tokenizer))

    def model(self) -> Seq2Seq | ParallelSeq2Seq:
        """Return the model, without parameters."""
        return build_model(self.config.model, self.config.train.objective)

    def cache(self, split: str) -> TokenCache:
        """Return the token ids of a split, prepared when they are missing.

        Raises:
            ConfigError: the data cannot be read, or not with the run's vocabulary.
        """
        tokenizers = self.source_tokenizer, self.target_tokenizer
        try:
            return open_split(self.config, split, tokenizers)
        except InvalidText as error:
            if self.origin:
                raise ConfigError(
                    f"the vocabularies of --init_from {self.origin} cannot spell the "
                    f"data: {error}: choose data that they can, or train from scratch"
                ) from error
            raise ConfigError(
                f"{self.workdir / 'vocabulary'} does not fit the data: {error}: "
                "restore it, or choose another --workdir"
            ) from error

    def checkpoints(self, *, read_only: bool) -> Checkpoints:
        """Open the run's checkpoints."""
        return Checkpoints(
            self.workdir / "checkpoints",
            keep_latest=self.config.train.keep_latest,
            keep_best=self.config.train.keep_best,
            keep_every=self.config.train.keep_every,
            read_only=read_only,
        )

    def record(self) -> None:
        """Write vocabularies and configuration, once nothing can be refused any more.

        The configuration comes last: it makes the directory a run.
        """
        if not (self.workdir / CONFIG_FILE).exists():
            tokenizers = self.source_tokenizer, self.target_tokenizer
            save_tokenizers(tokenizers, self.workdir)
        begun = {"init_from": self.origin._asdict()} if self.origin else {}
        write_config(self.workdir, self.config, **begun)

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


def create_run(
    config: Config,
    workdir: str,
    *,
    allowed_changes: Collection[str] = (),
    init_from: str = "",
) -> Run:
    """Make a working directory for a configuration, or go on in the one there.

    Everything that can be refused is refused before data is read.

    Args:
        config: its vocabulary sizes may be 0.
        workdir: folder or `gs://` path.
        allowed_changes: settings that may differ from the run in the directory.
        init_from: `WORKDIR[@STEP]` of another run, whose vocabularies and parameters a
            new run begins with; a run that has a checkpoint goes on from that.

    Raises:
        ConfigError: the configuration cannot work, differs from the run in the working
            directory, or the directory cannot be written.
    """
    objectives.validate(config)
    config = objectives.resolved(config)
    find_source(config)
    if config.data.distilled:
        Distillation(config.data.distilled)
    require_ema(config, config)
    path = epath.Path(workdir).expanduser()
    if config.train.tensorboard:
        require_tensorboard(path)
    require_writable(path)
    origin = None
    known = (path / CONFIG_FILE).exists()
    begun = bool(Checkpoints(path / "checkpoints", read_only=True).steps())
    if known:
        _require_same_settings(path, config, allowed_changes)
        tokenizers = load_tokenizers(path)
        origin = _origin_of(path, init_from, vocabulary_hash(tokenizers), begun)
    elif init_from:
        origin = find_origin(init_from)
        tokenizers = load_tokenizers(epath.Path(origin.workdir))
    else:
        tokenizers = new_tokenizers(config)
    sizes = {
        f"{side}_vocab": tokenizer.vocabulary.size
        for side, tokenizer in zip(SIDES, tokenizers, strict=True)
    }
    config = dataclasses.replace(config, model=_fitted(config.model, sizes))
    model = build_model(config.model, config.train.objective)
    if origin and not begun:
        mesh = make_mesh(ParallelConfig(data=1))
        origin.require_shapes_of(abstract_variables(model, mesh))
    return Run(path, config, *tokenizers, origin)


def _require_same_settings(
    path: epath.Path, config: Config, allowed: Collection[str]
) -> None:
    """Refuse to go on in a run of other settings, or in an average of checkpoints."""
    if "average" in read_record(path):
        raise ConfigError(
            f"--workdir {path} holds an average of checkpoints, which no optimiser can "
            f"go on from: begin a new run with --init_from={path}, or go on in the run "
            "that was averaged"
        )
    saved, now = to_dict(read_config(path)), to_dict(config)
    kept = _what_is_kept(saved["train"]), _what_is_kept(now["train"])
    for name in [name for name in kept[0] if kept[0][name] != kept[1][name]]:
        raise ConfigError(
            f"train.{name} was {saved['train'][name]!r} and decides what a checkpoint "
            "holds: set it back, or begin a new run with "
            f"--init_from={path}"
        )
    for settings in (saved, now):
        settings["model"] |= {f"{side}_vocab": 0 for side in SIDES}
    refuse_changes(saved, now, allowed)


def _what_is_kept(train: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a checkpoint holds, as far as they do."""
    return {
        "optimizer": train["optimizer"],
        "momentum": train["optimizer"] == "sgd" and train["momentum"] > 0,
        "ema_decay": train["ema_decay"] > 0,
    }


def _origin_of(
    path: epath.Path, init_from: str, vocabularies: str, begun: bool
) -> Origin | None:
    """Return what a run that exists began with, or begins with if it has not begun.

    Args:
        path: its working directory.
        init_from: what the flag says.
        vocabularies: hash of those in the directory.
        begun: whether it has a checkpoint.
    """
    saved = read_record(path).get("init_from")
    if init_from and begun:
        text = f"going on with the run in {path}: --init_from is ignored"
        print(text, file=sys.stderr, flush=True)
    if begun or not init_from:
        return Origin(**saved) if saved else None
    origin = find_origin(init_from)
    if vocabulary_hash(load_tokenizers(epath.Path(origin.workdir))) != vocabularies:
        raise ConfigError(
            f"--init_from {origin} has other vocabularies than the run in {path}: "
            "choose another --workdir"
        )
    return origin


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
    config = objectives.resolved(config)
    find_source(config)
    _require_same_model(saved, config)
    require_ema(config, saved)
    tokenizers = load_tokenizers(path)
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
        if line.startswith(("model.", "data.source:", "train.objective:"))
        and "model.dtype:" not in line
    ]
    if changes:
        raise ConfigError(
            f"a trained model cannot be changed ({'; '.join(changes)}): leave that out"
        )


def require_ema(config: Config, trained: Config) -> None:
    """Refuse to decode with an average that training does not keep.

    Raises:
        ConfigError: `decode.use_ema` is set, but `train.ema_decay` is 0.
    """
    if config.decode.use_ema and not trained.train.ema_decay:
        raise ConfigError(
            "decode.use_ema needs a run trained with train.ema_decay, such as 0.999, "
            "but it is 0: leave decode.use_ema out"
        )


def _fitted(model: ModelConfig, sizes: dict[str, int]) -> ModelConfig:
    for name, size in sizes.items():
        if getattr(model, name) not in (0, size):
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}, but the vocabulary has "
                f"{size} symbols: set it to 0 to take the vocabulary's size"
            )
    return dataclasses.replace(model, **sizes)
