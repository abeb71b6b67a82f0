"""Which checkpoint of another run a text names."""

import jax.numpy as jnp
import pytest

from transformer_jax.checkpoints import Checkpoints
from transformer_jax.config import ConfigError
from transformer_jax.origins import Origin, find_origin

LOSSES = {3: 2.0, 5: 1.0, 11: 4.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's checkpoints, of which step 5 is the best."""
    workdir = tmp_path_factory.mktemp("run@7")
    (workdir / "config.json").write_text("{}")
    with Checkpoints(workdir / "checkpoints", keep_latest=9) as checkpoints:
        for step, loss in LOSSES.items():
            params = {"dense": {"kernel": jnp.full((2, 3), step, jnp.float32)}}
            metadata = {"vocabulary": "none"}
            checkpoints.save(step, {"params": params}, metadata, metrics={"loss": loss})
    return workdir


@pytest.mark.parametrize(
    ("suffix", "step"), [("", 5), ("@best", 5), ("@latest", 11), ("@3", 3)]
)
def test_text_names_a_step(run, suffix, step):
    assert find_origin(f"{run}{suffix}") == Origin(str(run), step)


def test_without_a_metric_it_is_the_newest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for step in (2, 3):
            checkpoints.save(step, {"params": jnp.zeros(1)}, {})
    assert find_origin(str(tmp_path)).step == 3


def test_relative_directory_is_written_in_full(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert find_origin(f"{run.name}@3") == Origin(str(run), 3)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        ("@4", ["no step 4", "3, 5, 11"]),
        ("@first", ["@first names no run", "WORKDIR@"]),
    ],
)
def test_what_is_not_there_is_refused(run, suffix, words):
    with pytest.raises(ConfigError) as caught:
        find_origin(f"{run}{suffix}")
    for word in ["--init_from", *words]:
        assert word in str(caught.value)


def test_run_without_checkpoints_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no checkpoint"):
        find_origin(str(tmp_path))


def test_parameters_are_read_or_the_first_that_differs_is_named(run):
    origin = find_origin(f"{run}@3")
    restored = origin.restore({"params": {"dense": {"kernel": jnp.zeros((2, 3))}}})
    assert (restored.step, restored.metadata) == (3, {"vocabulary": "none"})
    assert (restored.state["params"]["dense"]["kernel"] == 3).all()
    with pytest.raises(ConfigError) as caught:
        origin.restore({"params": {"dense": {"kernel": jnp.zeros((2, 7))}}})
    for word in (
        "float32[2, 3]",
        "params/dense/kernel",
        "float32[2, 7]",
        "config.json",
    ):
        assert word in str(caught.value)
