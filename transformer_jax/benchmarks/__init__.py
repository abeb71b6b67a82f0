"""Benchmarks, one module each, with `Settings`, a record of flags, and `run(settings)`.

`run` says what it finds on standard error and returns what is printed as one JSON line.
"""

from transformer_jax.benchmarks import attention, decode, train

# Benchmark by its name in `transformer-jax bench NAME`.
BENCHMARKS = {"attention": attention, "decode": decode, "train": train}
