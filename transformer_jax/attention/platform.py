"""For which platform programs are made: this machine's, unless another is assumed."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_ASSUMED: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "platform", default=None
)


@contextlib.contextmanager
def assume_platform(name: str) -> Iterator[None]:
    """Let attention choose for another platform while programs are traced.

    To compile ahead of time for a TPU on a machine without one.

    Args:
        name: "cpu", "gpu" or "tpu".
    """
    token = _ASSUMED.set(name)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def platform() -> str:
    """Return "cpu", "gpu" or "tpu"."""
    return _ASSUMED.get() or jax.default_backend()
