"""The device mesh, and the one table from logical axes to mesh axes.

Parameters name what their axes mean (`types.LOGICAL_AXES`); `RULES` says over which
mesh axis each is split. Anything unknown is an error: flax would replicate it silently.
"""

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError, ParallelConfig
from transformer_jax.types import (
    BATCH,
    EMBED,
    HEAD,
    HEADS,
    LAYERS,
    LENGTH,
    MLP,
    POSITION,
    RANK,
    VOCAB,
    PyTree,
)

MESH_AXES = ("data", "fsdp", "sequence", "model")

RULES = (
    (BATCH, "data"),
    (LENGTH, "sequence"),
    (POSITION, None),
    (EMBED, "fsdp"),
    (HEADS, "model"),
    (HEAD, None),
    (MLP, "model"),
    (VOCAB, "model"),
    (LAYERS, None),
    (RANK, None),
)


def make_mesh(config: ParallelConfig) -> Mesh:
    """Return the mesh `(data, fsdp, sequence, model)` over this run's devices.

    Axis types are Auto: the compiler propagates shardings (GSPMD).

    Raises:
        ConfigError: there are fewer devices than `parallel.data` asks for.
    """
    devices = jax.devices()
    data = len(devices) if config.data == -1 else config.data
    if not 1 <= data <= len(devices):
        raise ConfigError(
            f"parallel.data={config.data} needs {config.data} devices, but there are "
            f"{len(devices)}: use -1 for all of them"
        )
    return jax.make_mesh(
        (data, 1, 1, 1),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices[:data],
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, boxed: PyTree) -> PyTree:
    """Return the sharding of each parameter of an abstract, boxed tree.

    Args:
        mesh: from `make_mesh`.
        boxed: `jax.eval_shape` of a model's `init`, with flax's logical metadata.

    Raises:
        ValueError: a parameter has no logical axes, an unknown one, or a size that its
            mesh axis does not divide.
    """
    rules = dict(RULES)

    def sharding(path: tuple, box: object) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        if not isinstance(box, nn.LogicallyPartitioned):
            raise ValueError(f"parameter {name} names no logical axes")
        if unknown := [axis for axis in box.names if axis not in rules]:
            raise ValueError(f"parameter {name} has the unknown logical axis {unknown}")
        shape = box.value.shape
        for size, axis in zip(shape, box.names, strict=True):
            parts = mesh.shape[rules[axis]] if rules[axis] else 1
            if size % parts:
                raise ValueError(
                    f"parameter {name}: {parts} devices do not divide {axis}={size}"
                )
        return NamedSharding(mesh, PartitionSpec(*(rules[a] for a in box.names)))

    return jax.tree_util.tree_map_with_path(
        sharding, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
