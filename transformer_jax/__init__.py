"""Sequence-to-sequence Transformers in JAX: kernels, training and decoding.

Import what you need from its module: `transformer_jax.attention`,
`transformer_jax.decoding`, `transformer_jax.models`.
"""

__version__ = "0.1.0"
