"""The mesh and the rules: everything unknown is an error, nothing is replicated."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from tiny import TINY

from transformer_jax.config import ConfigError, ParallelConfig
from transformer_jax.models import build_model
from transformer_jax.sharding import MESH_AXES, RULES, make_mesh, param_shardings
from transformer_jax.types import EMBED, LOGICAL_AXES, VOCAB


def boxed_parameters(**settings):
    model = build_model(dataclasses.replace(TINY, **settings))
    tokens = jnp.ones((1, 2), jnp.int32)
    return jax.eval_shape(
        lambda: model.init(jax.random.key(0), tokens, jnp.ones(1, int), tokens)
    )["params"]


def test_rules_name_every_logical_axis_once_and_only_axes_of_the_mesh():
    assert sorted(name for name, _ in RULES) == sorted(LOGICAL_AXES)
    assert {axis for _, axis in RULES} <= {*MESH_AXES, None}


@pytest.mark.parametrize(("asked", "data"), [(-1, 8), (1, 1), (5, 5)])
def test_mesh_takes_the_devices_asked_for(asked, data):
    mesh = make_mesh(ParallelConfig(data=asked))
    assert dict(mesh.shape) == {"data": data, "fsdp": 1, "sequence": 1, "model": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("asked", [0, 9])
def test_more_or_fewer_devices_than_there_are_is_refused(asked):
    with pytest.raises(ConfigError, match=f"parallel.data={asked} needs {asked}"):
        make_mesh(ParallelConfig(data=asked))


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("activation", "norm", "tied"),
    [("relu", "layer", "target"), ("swiglu", "rms", "none")],
)
def test_every_parameter_names_its_axes(scan, activation, norm, tied):
    boxed = boxed_parameters(
        scan_layers=scan, activation=activation, norm=norm, tied_embeddings=tied
    )
    mesh = make_mesh(ParallelConfig())
    shardings = param_shardings(mesh, boxed)
    assert jax.tree.structure(shardings) == jax.tree.structure(nn.unbox(boxed))
    embedding = shardings["target_frontend"]["embedding"]["embedding"]
    assert embedding.spec == PartitionSpec("model", "fsdp")


def test_parameters_without_axes_are_refused():
    bare = {"kernel": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"kernel.* names no logical axes"):
        param_shardings(make_mesh(ParallelConfig()), bare)


def test_unknown_axes_are_refused():
    box = nn.LogicallyPartitioned(jnp.ones((2, 3)), (EMBED, "magic"))
    with pytest.raises(ValueError, match=r"unknown logical axis.*magic"):
        param_shardings(make_mesh(ParallelConfig()), {"kernel": box})


def test_sizes_that_devices_do_not_divide_are_refused():
    mesh = jax.make_mesh((1, 1, 1, 8), MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    box = nn.LogicallyPartitioned(jnp.ones((13, 8)), (VOCAB, EMBED))
    with pytest.raises(ValueError, match="8 devices do not divide vocab=13"):
        param_shardings(mesh, {"embedding": box})


def test_configuration_of_devices_is_checked():
    with pytest.raises(ConfigError, match=r"parallel\.data must be at least -1"):
        dataclasses.replace(ParallelConfig(), data=-2)
