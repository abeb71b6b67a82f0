"""How a checkpoint lies on the disk; the only file that knows Orbax.

The folder of a step holds `state/`, the arrays as Orbax writes them; `metadata/`, one
JSON record; and `files.json`, the size and checksum of every file of both. Orbax gives
the folder its name after `files.json` is written, so a step without it was never
finished, and damage is found before a byte is taken for a number.
"""

import dataclasses
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from transformer_jax.run_directory import is_local, write_json
from transformer_jax.types import PyTree

FILES = "files.json"
STATE, RECORD = "state", "metadata"


class Writer:
    """Saves steps in the background and deletes those that `keep` leaves out.

    Folders that a killed run left unfinished are removed when it is made; nothing is
    deleted before the step that replaces it is complete.

    Args:
        directory: absolute; created.
        keep: the steps, rising, the one being saved last -> those to keep.
    """

    def __init__(
        self, directory: epath.Path, keep: Callable[[list[int]], Collection[int]]
    ) -> None:
        silence_orbax()
        self._directory = directory
        self._saving: int | None = None
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Keep(keep),
                cleanup_tmp_directories=True,
                async_options=ocp.options.AsyncOptions(
                    post_finalization_callback=self._seal
                ),
            ),
        )

    def latest(self) -> int | None:
        """Return the highest step, the one being saved included."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, record: Any) -> None:
        """Copy the state to the host and start to write it; call `wait` before."""
        self._saving = step
        items = {
            STATE: ocp.args.PyTreeSave(state),
            # Through text: a copy that the caller cannot change while it is written.
            RECORD: ocp.args.JsonSave(json.loads(json.dumps(record))),
        }
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Wait for the save in progress and raise what went wrong in it."""
        try:
            self._manager.wait_until_finished()
        except Exception:
            # Orbax has forgotten the steps that it meant to delete after this one.
            self._manager.reload()
            raise

    def set_aside(self, steps: Collection[int]) -> None:
        """Rename steps that cannot be read, which else would count as the latest."""
        if jax.process_index() == 0:
            for step in steps:
                aside = self._directory / f"unreadable-{step}"
                if aside.exists():
                    aside.rmtree()
                (self._directory / str(step)).rename(aside)
        ocp.multihost.sync_global_processes("transformer_jax:set_aside")
        self._manager.reload()

    def close(self) -> None:
        """Release what Orbax holds; call `wait` before."""
        self._manager.close()

    def _seal(self) -> None:
        """List the files, while the folder still has its temporary name."""
        for folder in self._directory.glob(f"{self._saving}*"):
            if folder.name.partition(".")[0] == str(self._saving):
                fingerprints = {
                    str(file.relative_to(folder)): _fingerprint(file)
                    for file in (*_files(folder / STATE), *_files(folder / RECORD))
                }
                write_json(folder / FILES, fingerprints)


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Orbax's preservation policy, from a function of the steps."""

    keep: Callable[[list[int]], Collection[int]]

    def should_preserve(self, checkpoints: Sequence, *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self.keep(steps)
        return [step in kept for step in steps]


def read_record(folder: epath.Path) -> dict:
    """Return a step's JSON record."""
    return json.loads((folder / RECORD / RECORD).read_text())


def describe(state: PyTree) -> dict[str, str]:
    """Return path -> type and shape of every leaf, such as `float32[3, 5]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def first_difference(
    one: dict[str, str], other: dict[str, str], entries: Collection[str] = ()
) -> tuple[str, str, str] | None:
    """Return the first path below `entries` where two descriptions differ, and both."""
    for path in [*other, *one]:
        if not entries or path.partition("/")[0] in entries:
            pair = one.get(path, "nothing"), other.get(path, "nothing")
            if pair[0] != pair[1]:
                return path, *pair
    return None


def require_whole(folder: epath.Path) -> None:
    """Raise ValueError unless every file of a step is as it was written."""
    if not (folder / FILES).exists():
        raise ValueError(f"{FILES} is missing: the save was never finished")
    for name, written in json.loads((folder / FILES).read_text()).items():
        if not (folder / name).exists():
            raise ValueError(f"{name} is missing")
        found = _fingerprint(folder / name)
        if found[0] != written[0]:
            raise ValueError(f"{name} has {found[0]} bytes instead of {written[0]}")
        if found != written:
            raise ValueError(f"{name} has changed: its checksum differs")


def read_state(folder: epath.Path, wanted: PyTree) -> PyTree:
    """Return the wanted leaves on their shardings; other leaves are not read."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding or here
        ),
        wanted,
    )
    arguments = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder / STATE, args=arguments)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    """Every file below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _fingerprint(file: epath.Path) -> list[int]:
    """Size and CRC-32; of an object in a store, which checks its bytes, the size."""
    if not is_local(file):
        return [file.stat().length]
    size = checksum = 0
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, checksum]


class _NotOrbax(logging.Filter):
    """Drops what Orbax logs: its errors reach the user as one line of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not any(
            f"orbax{os.sep}checkpoint" in text
            for text in (record.pathname, record.getMessage())
        )


@dataclasses.dataclass(frozen=True)
class _NotClosedLoop:
    """Drops what TensorStore's threads print when Orbax gave up a read or a write."""

    previous: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.previous(unraisable)


def silence_orbax() -> None:
    """Keep what Orbax logs and its threads print off the terminal; done once."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(item, _NotOrbax) for item in logger.filters):
            logger.addFilter(_NotOrbax())
    if not isinstance(sys.unraisablehook, _NotClosedLoop):
        sys.unraisablehook = _NotClosedLoop(sys.unraisablehook)
