"""Outputs of a teacher in place of the references of a training split.

A folder that `transformer-jax distill` writes: `outputs.txt`, one line for each source
of the split, in order, empty where the teacher has no usable output; `manifest.json`,
which tells how it came about. Sequence-level knowledge distillation: Kim and Rush 2016.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from transformer_jax.config import ConfigError
from transformer_jax.data.sources import Example

OUTPUTS, MANIFEST = "outputs.txt", "manifest.json"


class Distillation:
    """A finished distillation, ready to be read.

    Attributes:
        folder: where it lies.
        name: what tells it from others, for the names of caches.
    """

    def __init__(self, folder: str) -> None:
        """Read the manifest.

        Raises:
            ConfigError: there is no distillation, or it is unfinished or damaged.
        """
        self.folder = pathlib.Path(folder).expanduser()
        path = self.folder / MANIFEST
        try:
            manifest: dict[str, Any] = json.loads(path.read_text("utf-8"))
            complete = manifest["complete"]
            self._source: str = manifest["source"]
            self._vocabulary: str = manifest["teacher"]["vocabulary"]
            self._sha256: str = manifest["outputs_sha256"]
            self.name = self._sha256[:16]
        except FileNotFoundError:
            raise ConfigError(
                f"data.distilled {folder} holds no distillation ({MANIFEST} is "
                "missing): make one with transformer-jax distill"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} cannot be read ({error}): distill once more"
            ) from error
        if not complete:
            raise ConfigError(
                f"the distillation in {folder} is not finished: call transformer-jax "
                "distill once more, it goes on where it was"
            )

    def require_fit(self, source: str, vocabulary_hash: str) -> None:
        """Refuse to train a model on outputs that are not for it.

        Raises:
            ConfigError: the outputs are of another data set, or the teacher has other
                vocabularies.
        """
        if self._source != source:
            raise ConfigError(
                f"data.distilled {self.folder} was made of data.source "
                f"{self._source!r}, not {source!r}: distill that one"
            )
        if self._vocabulary != vocabulary_hash:
            raise ConfigError(
                f"the teacher of data.distilled {self.folder} has other vocabularies "
                "than this run: distill with a teacher that was trained on the same "
                "data"
            )

    def examples(self, raw: Sequence[Example], *, keep_raw: bool) -> list[Example]:
        """Return the examples with the teacher's outputs as their references.

        Args:
            raw: the training split, in order; where there is no output, its references
                stay.
            keep_raw: whether they stay beside the outputs, too.

        Raises:
            ConfigError: the file of outputs is damaged, or is not of these examples.
        """
        path = self.folder / OUTPUTS
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self._sha256:
            raise ConfigError(f"{path} is damaged: distill once more")
        outputs = data.decode("utf-8").split("\n")[:-1]
        if len(outputs) != len(raw):
            raise ConfigError(
                f"{path} has {len(outputs)} lines for {len(raw)} sources: the data is "
                "not what was distilled; distill once more"
            )
        return [
            _distilled(example, output, keep_raw)
            for example, output in zip(raw, outputs, strict=True)
        ]


def _distilled(example: Example, output: str, keep_raw: bool) -> Example:
    if not output:
        return example
    raw = example.references if keep_raw else ()
    return Example(example.source, tuple(dict.fromkeys((output, *raw))))
