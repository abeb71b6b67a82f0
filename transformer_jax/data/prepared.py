"""Data sets of `tensorflow-datasets`, prepared once and kept in array_record files.

They are read with `as_data_source()`, so TensorFlow is not needed. Importing this
module imports tensorflow-datasets; `sources` does it when it must.
"""

import contextlib
import io
import logging
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from transformer_jax.config import ConfigError
from transformer_jax.run_directory import one_line

SPLITS = ("train", "validation", "test")
Builder = tfds.core.GeneratorBasedBuilder


class DataSet(NamedTuple):
    """A data set.

    Attributes:
        builder: its class, which yields ascending integer keys.
        title: its name for people.
        config: which of the builder's configurations, if it has any.
    """

    builder: type[Builder]
    title: str
    config: str | None = None

    def read(self, directory: str, split: str) -> list[dict[str, Any]]:
        """Return the examples of a split, in the order in which they were generated.

        The data set is prepared in `directory` first when it is not there yet; a
        preparation that was interrupted is done again.

        Raises:
            ConfigError: the data is missing, or `directory` is unusable or damaged.
            ValueError: there is no such split.
        """
        if split not in SPLITS:
            raise ValueError(
                f"{self.title} has no split {split!r}: one of {', '.join(SPLITS)}"
            )
        with _quiet():
            builder = self.opened(directory)
            if not builder.is_prepared():
                builder = self.prepare(builder, directory)
            try:
                rows = builder.as_data_source(split)
                return rows.__getitems__(range(len(rows)))
            # Each layer below has its own way to say that a file is damaged.
            except Exception as error:
                raise self._damaged(directory, error) from error

    def opened(self, directory: str) -> Builder:
        """Return the builder, which has read what is on disk.

        Raises:
            ConfigError: that is damaged.
        """
        try:
            return self.builder(
                data_dir=directory, config=self.config, file_format="array_record"
            )
        except Exception as error:
            raise self._damaged(directory, error) from error

    def prepare(self, builder: Builder, directory: str) -> Builder:
        """Write the data set, and return the builder of what is then on disk.

        Raises:
            ConfigError: the directory cannot be written.
        """
        print(f"preparing {self.title} in {directory}", file=sys.stderr, flush=True)
        tfds.disable_progress_bar()
        try:
            # Writes to a folder beside the final one and renames that at the end.
            builder.download_and_prepare()
        # A full disk is a RuntimeError of the file format.
        except (OSError, RuntimeError) as error:
            # Another process may have been faster with the same work.
            if not self.opened(directory).is_prepared():
                raise ConfigError(
                    f"cannot prepare {self.title} in {directory} "
                    f"({one_line(error)}): set data.directory to a folder with room "
                    "that can be written"
                ) from error
        return self.opened(directory)

    def _damaged(self, directory: str, error: Exception) -> ConfigError:
        """Return the error to raise for files that cannot be read."""
        path = pathlib.Path(directory, self.builder.name, self.config or "")
        return ConfigError(
            f"the data set in {path} is damaged ({one_line(error)}): delete it"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence tensorflow-datasets.

    It prints on standard output, which belongs to results, and warns that a data set
    is missing before it prepares it; what goes wrong, it raises.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
