"""Event files for TensorBoard; the only file that knows tensorboardX."""

import importlib.util
from typing import Any

from transformer_jax.config import ConfigError, remedy
from transformer_jax.run_directory import is_local


def require_tensorboard(workdir: Any) -> None:
    """Refuse what cannot be written, before work starts.

    Raises:
        ConfigError: tensorboardX is not installed, or the directory is not a local one.
    """
    if not is_local(workdir):
        raise ConfigError(
            f"train.tensorboard writes to local folders, not to {workdir}: leave it "
            "out, metrics.jsonl has the same numbers"
        )
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            "train.tensorboard needs a package that is missing: "
            + remedy("tensorboard")
        )


class EventFiles:
    """The reports of a run as scalars, under the names that `MetricsFile` has.

    `metrics.jsonl` is the record; this is a view, written by a thread within seconds.

    Args:
        folder: local; created.
        resumed_step: what earlier starts wrote for later steps is hidden.
    """

    def __init__(self, folder: Any, *, resumed_step: int) -> None:
        import tensorboardX

        # A queue without an end: training must not wait where the disk is full.
        self._writer = tensorboardX.SummaryWriter(
            logdir=str(folder),
            purge_step=resumed_step + 1,
            max_queue=0,
            flush_secs=5,
        )

    def write(self, step: int, **values: float) -> None:
        """Write every value."""
        for name, value in values.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()
