"""Linear maps of features, with the logical axes of their kernels."""

import math
from typing import Any

import flax.linen as nn
import jax

_kernel_init = nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")


def make_projection(
    features: int | tuple[int, ...],
    axes: tuple[str, ...],
    *,
    contract: int = 1,
    use_bias: bool = True,
    dtype: Any = None,
) -> nn.Module:
    """Return a linear map of the last `contract` axes to `features`.

    `axes` names the logical axes of its kernel: inputs, then outputs.
    """
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-contract, 0)),
        use_bias=use_bias,
        dtype=dtype,
        dot_general=_flat_dot_general,
        kernel_init=nn.with_logical_partitioning(_kernel_init, axes),
        bias_init=nn.with_logical_partitioning(
            nn.initializers.zeros_init(), axes[contract:]
        ),
    )


def _flat_dot_general(
    x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any
) -> jax.Array:
    """The product of DenseGeneral on matrices: `[B, T, ...]` as `[B T, ...]`.

    With two axes of rows XLA's CPU compiler transposes what comes back before it
    multiplies, and takes its slower product for it.
    """
    contract = len(dimension_numbers[0][0])
    rows, columns = x.shape[:-contract], kernel.shape[contract:]
    product = jax.lax.dot_general(
        x.reshape(math.prod(rows), -1),
        kernel.reshape(-1, math.prod(columns)),
        (((1,), (0,)), ((), ())),
        **options,
    )
    return product.reshape(*rows, *columns)
