"""cuDNN's fused attention on a GPU, through `jax.nn`, for three patterns."""

import jax
from jaxtyping import Array

from transformer_jax import masks
from transformer_jax.attention import reach
from transformer_jax.attention.arguments import Call
from transformer_jax.attention.platform import platform
from transformer_jax.patterns import Pattern, atoms, base

# What jax.nn runs; tests without a GPU put "xla" here.
BACKEND = "cudnn"


def attend(call: Call, block_size: int | None = None) -> tuple[Array, None]:
    """Return the output of a call `[B, T, N, V]`; there is no log-sum-exp.

    Raises:
        NotImplementedError: the kernel cannot do this call, or there is no GPU.
        ValueError: a block size is given.
    """
    if block_size is not None:
        raise ValueError("cudnn chooses its own tiles; leave block_size=None")
    reason = refusal(call)
    if reason is None and BACKEND == "cudnn" and platform() != "gpu":
        reason = "runs on GPUs only"
    if reason:
        raise NotImplementedError(
            f"implementation='cudnn' {reason}: use implementation='xla'"
        )
    call, alive = reach.cleaned(call)
    causal, window = window_of(call.pattern)
    output = jax.nn.dot_product_attention(
        *call[:3],
        scale=call.scale,
        is_causal=causal,
        query_seq_lengths=call.limits.query_lengths,
        key_value_seq_lengths=call.limits.key_lengths,
        local_window_size=window,
        implementation=BACKEND,
    )
    return masks.or_zero(alive, output), None


def refusal(call: Call) -> str | None:
    """Return why cuDNN, as `jax.nn` calls it, cannot do a call; None where it can."""
    limits = call.limits
    if call.rate:
        return "has no dropout that other implementations share"
    if call.bias is not None or limits.mask is not None or limits.query_ids is not None:
        return "takes no bias, mask or segments here"
    if isinstance(call.scale, jax.Array):
        return "wants a scale that is a number"
    if call.value.shape[-1] != call.key.shape[-1]:
        return "wants values as wide as keys"
    if call.offset:
        return "has no query_offset"
    if window_of(call.pattern) is None:
        return f"has the patterns full, causal and local, not {call.pattern}"
    return None


def window_of(pattern: Pattern | None) -> tuple[bool, tuple[int, int] | None] | None:
    """Return causality and window (left, right) of a pattern; None if it is another."""
    parts = pattern.parts if isinstance(pattern, base.And) else (pattern,)
    causal, window = False, None
    for part in parts:
        if isinstance(part, atoms.Causal):
            causal = True
        elif isinstance(part, atoms.Local) and part.dilation == 1 and window is None:
            window = (part.left, part.right)
        elif part is not None and not isinstance(part, atoms.Full):
            return None
    return causal, window
