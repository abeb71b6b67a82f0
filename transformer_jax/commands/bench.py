"""transformer-jax bench: speed, beside other systems, measured in turn in one run.

  transformer-jax bench decode [--batches=1,8,32] [--depths=6-6,12-1] [--beam=4]
      [--systems=jax,transformers,ctranslate2,ctranslate2-int8]
      [--lengths=fixed,natural] [--largest=64,128,256]
  transformer-jax bench attention [--patterns="local(128); strided(128)"]
      [--lengths=4096,16384] [--heads=8] [--passes=forward,backward] [--block=128]
      [--systems=jax,jax-dense,jax-nn,torch-sdpa,torch-flex] [--dtype=bfloat16]
  transformer-jax bench kinds [--kinds="full(); linear(); linformer(rank=128)"]
      [--lengths=1024,4096,16384] [--causal=1] [--passes=forward,backward]
  transformer-jax bench train [--rows=32] [--systems=jax,torch,torch-compile]
      [--depth=6-6] [--dropout=0.1] [--compile_seconds=900]

decode and train take --width, --heads, --feed_forward, --vocabulary, --source_length
and --target_length, all take --rounds, --seconds, --pause and --seed. Weights are drawn
by chance, the same in all systems. Others are measured if they are installed (`pip
install "transformer-jax[bench]"`); what is missing is said. A table goes to standard
error, all numbers to the JSON line. The machine should be idle.
"""

import dataclasses
from typing import Any

from absl import flags

from transformer_jax.benchmarks import BENCHMARKS
from transformer_jax.config import ConfigError

DEFINE = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    tuple: flags.DEFINE_list,
}


def define_flags(values: flags.FlagValues, argv: list[str]) -> None:
    """Take the benchmark's name out of the arguments and define its settings.

    Raises:
        ConfigError: no benchmark is named, or an unknown one.
    """
    name = argv.pop(1) if argv[1:] and not argv[1].startswith("-") else None
    if name not in BENCHMARKS:
        known = " or ".join(f"bench {each}" for each in BENCHMARKS)
        what = f"{name!r} is no benchmark" if name else "which benchmark?"
        raise ConfigError(f"{what}: say {known}")
    flags.DEFINE_string("benchmark", name, "Its name, said first.", flag_values=values)
    flags.register_validator(
        "benchmark",
        lambda value: value == name,
        message=f"it is named first: bench {name}",
        flag_values=values,
    )
    for item in dataclasses.fields(BENCHMARKS[name].Settings):
        default, help_text = item.default, item.metadata["help"]
        if isinstance(default, tuple):
            default = [*map(str, default)]
        DEFINE[type(item.default)](item.name, default, help_text, flag_values=values)


def run(values: flags.FlagValues) -> dict[str, Any]:
    """Run the benchmark; return all its numbers.

    Raises:
        ConfigError: a setting is out of its range.
    """
    benchmark = BENCHMARKS[values.benchmark]
    settings = {
        item.name: _value(item, values[item.name].value)
        for item in dataclasses.fields(benchmark.Settings)
    }
    return benchmark.run(benchmark.Settings(**settings))


def _value(item: dataclasses.Field, value: Any) -> Any:
    """Read a list's entries as its default has them."""
    if not isinstance(item.default, tuple):
        return value
    try:
        return tuple(type(item.default[0])(entry) for entry in value)
    except ValueError:
        raise ConfigError(f"--{item.name} takes numbers, not {value}") from None
