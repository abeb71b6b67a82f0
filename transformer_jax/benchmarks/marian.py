"""The same model in PyTorch: MarianMT of `transformers`, with our weights.

Nothing is downloaded. Our positions interleave sines and cosines where Marian's stand
one half after the other, so the axes of the model's width are permuted: then both
compute the same function, and greedy outputs can be compared token by token.

`torch` and `transformers`, of the `bench` extra, are imported where they are needed.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from transformer_jax.benchmarks.shape import Symbols
from transformer_jax.config import ModelConfig
from transformer_jax.types import PyTree

NEVER = -1e9
ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def make_marian(
    config: ModelConfig,
    params: PyTree,
    symbols: Symbols,
    *,
    max_length: int,
    end_bias: float = 0.0,
    never: Collection[int] = (),
) -> Any:
    """Return a MarianMTModel that computes what ours does with these parameters.

    Args:
        config: post norm, tied embeddings, ReLU; see `Shape.model_config`.
        params: of the model that `config` describes.
        symbols: PAD begins an output.
        max_length: positions that the model has.
        end_bias: added to the logits of END.
        never: tokens that are never written.
    """
    import transformers

    model = transformers.MarianMTModel(_marian_config(config, symbols, max_length))
    state = model.state_dict()
    for name, values in _weights(params, config.width):
        _copy(state, name, values)
    bias = state["final_logits_bias"]
    bias.zero_()
    bias[0, symbols.end_id] = end_bias
    bias[0, list(never)] = NEVER
    return model


def _marian_config(config: ModelConfig, symbols: Symbols, max_length: int) -> Any:
    import transformers

    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", getattr(config, f"{side}_layers")),
            ("attention_heads", config.heads),
            ("ffn_dim", config.feed_forward),
        )
    }
    return transformers.MarianConfig(
        **sizes,
        vocab_size=config.target_vocab,
        d_model=config.width,
        max_position_embeddings=max_length,
        activation_function=config.activation,
        scale_embedding=config.scale_embeddings,
        dropout=config.dropout,
        # Ours drops what the nonlinearity gives, too.
        activation_dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        pad_token_id=symbols.pad_id,
        decoder_start_token_id=symbols.bos_id,
        eos_token_id=symbols.end_id,
        forced_eos_token_id=None,
    )


def _copy(state: Mapping[str, Any], name: str, values: np.ndarray) -> None:
    import torch

    if state[name].shape != values.shape:
        raise ValueError(f"{name} is {tuple(state[name].shape)}, not {values.shape}")
    state[name].copy_(torch.from_numpy(np.array(values, np.float32)))


def _weights(params: PyTree, width: int) -> Iterator[tuple[str, np.ndarray]]:
    """Marian's name and value of every parameter; linear maps are `[out, in]` there."""
    # Sines stand on our even places, cosines on the odd ones.
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
    table = np.asarray(params["source_frontend"]["embedding"]["embedding"])[:, order]
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
        yield f"model.{name}.weight", table
    yield "lm_head.weight", table
    for side in NORMS:
        for layer, block in params[side]["stack"].items():
            where = f"model.{side}.layers.{layer.removeprefix('layers_')}"
            for name, values in _block(block, NORMS[side], order):
                yield f"{where}.{name}", values


def _block(
    block: PyTree, norms: tuple[str, ...], order: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    for number, name in enumerate(norms):
        yield f"{name}.weight", np.asarray(block[f"norms_{number}"]["scale"])[order]
        yield f"{name}.bias", np.asarray(block[f"norms_{number}"]["bias"])[order]
    for part, name in ATTENTIONS.items():
        for ours, theirs in PROJECTIONS.items() if part in block else ():
            inward = ours != "out"
            linear = _linear(block[part][ours], order, inward=inward)
            yield from ((f"{name}.{theirs}.{key}", v) for key, v in linear)
    for number, name in enumerate(("fc1", "fc2")):
        part = block["feed_forward"][f"DenseGeneral_{number}"]
        linear = _linear(part, order, inward=number == 0)
        yield from ((f"{name}.{key}", v) for key, v in linear)


def _linear(
    part: PyTree, order: np.ndarray, *, inward: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """A map from the model's width (inward) or to it."""
    width = len(order)
    kernel = np.asarray(part["kernel"])
    kernel = kernel.reshape((width, -1) if inward else (-1, width))
    kernel = kernel[order] if inward else kernel[:, order]
    # Our keys have no bias.
    bias = np.zeros(kernel.shape[1], np.float32)
    if "bias" in part:
        bias = np.asarray(part["bias"]).reshape(-1)
        bias = bias if inward else bias[order]
    yield "weight", kernel.T
    yield "bias", bias
