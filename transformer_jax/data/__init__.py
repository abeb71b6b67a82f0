"""Data: sources, tokenizers, the token cache, the batch plan and the loader."""

from transformer_jax.data.cache import TokenCache, open_cache
from transformer_jax.data.loader import Prefetcher, device_batch, make_rows
from transformer_jax.data.plan import BatchPlan, Bucket, Step
from transformer_jax.data.sources import SOURCES, Example, Source, data_directory
from transformer_jax.data.tokenizers import (
    TOKENIZERS,
    InvalidText,
    Tokenizer,
    Vocabulary,
    build_vocabulary,
    make_tokenizer,
)

__all__ = [
    "SOURCES",
    "TOKENIZERS",
    "BatchPlan",
    "Bucket",
    "Example",
    "InvalidText",
    "Prefetcher",
    "Source",
    "Step",
    "TokenCache",
    "Tokenizer",
    "Vocabulary",
    "build_vocabulary",
    "data_directory",
    "device_batch",
    "make_rows",
    "make_tokenizer",
    "open_cache",
]
