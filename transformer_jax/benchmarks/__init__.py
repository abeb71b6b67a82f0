"""Benchmarks, one module each, with `Settings`, a record of flags, and `run(settings)`.

`run` says what it finds on standard error and returns what is printed as one JSON line.
"""

from transformer_jax.benchmarks import attention, decode, kinds, train

# Benchmark by its name in `transformer-jax bench NAME`.
BENCHMARKS = {
    "attention": attention,
    "decode": decode,
    "kinds": kinds,
    "train": train,
}
