"""PyTorch's attention on one of our patterns: scaled dot product, and FlexAttention."""

import functools
import importlib.util
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from transformer_jax.config import remedy


def prepare(case: Any, system: str, name: str) -> tuple[Callable, Callable]:
    """Return a call for one pass, and what makes NumPy of its output.

    Args:
        case: pattern, length and settings of `benchmarks.attention`.
        system: "torch-sdpa" or "torch-flex".
        name: "forward" or "backward".

    Raises:
        ImportError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"torch is not installed: {remedy('bench')}")
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case.settings.dtype)
    # PyTorch puts heads before positions.
    query, key, value, cotangent = (
        torch.from_numpy(np.ascontiguousarray(x.swapaxes(1, 2))).to(device, dtype)
        for x in case.arrays
    )
    attend = FUNCTIONS[system](torch, case, device)

    def forward() -> Any:
        with torch.no_grad():
            return _finished(torch, device, attend(query, key, value))

    def backward() -> Any:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = attend(*leaves)
        output.backward(cotangent)
        return _finished(torch, device, output)

    def output(result: Any) -> np.ndarray:
        return result.detach().float().cpu().numpy().swapaxes(1, 2)

    return {"forward": forward, "backward": backward}[name], output


def _finished(torch: Any, device: str, result: Any) -> Any:
    if device == "cuda":
        torch.cuda.synchronize()
    return result


def _sdpa(torch: Any, case: Any, device: str) -> Callable:
    mask = torch.from_numpy(case.pattern.dense(case.length, case.length)).to(device)
    grouped = case.settings.heads != case.settings.kv_heads
    return lambda *x: torch.nn.functional.scaled_dot_product_attention(
        *x, attn_mask=mask, enable_gqa=grouped
    )


def _flex(torch: Any, case: Any, device: str) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    heads = case.pattern.heads

    def edge(batch: Any, head: Any, i: Any, j: Any) -> Any:
        del batch
        if not heads:
            return case.pattern.allowed(i, j)
        patterns = map(case.pattern.of_head, range(heads))
        marks = ((head == n) & each.allowed(i, j) for n, each in enumerate(patterns))
        return functools.reduce(operator.or_, marks)

    blocks = create_block_mask(
        edge, None, heads, case.length, case.length, device=device
    )
    # Each length its own program: PyTorch would generalise over them, or give up.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.settings.heads != case.settings.kv_heads
    return lambda *x: compiled(*x, block_mask=blocks, enable_gqa=grouped)


FUNCTIONS = {"torch-sdpa": _sdpa, "torch-flex": _flex}
