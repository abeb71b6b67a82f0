"""One trained run for all tests of the command line."""

import shutil

import pytest
from command_line import TRAINED, quick, train
from toy import prepared


@pytest.fixture(scope="package", autouse=True)
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy")
    with prepared(directory):
        yield directory / "data"


@pytest.fixture(scope="package")
def trained(data, tmp_path_factory):
    """A trained run, and what training it printed; to be read only."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    return workdir, train(data, workdir, **TRAINED)


@pytest.fixture
def copied(trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained[0], workdir)
    return workdir


@pytest.fixture(scope="package")
def with_ema(data, tmp_path_factory):
    """A run that keeps a moving average of its parameters; to be read only."""
    workdir = tmp_path_factory.mktemp("ema") / "run"
    changes = {**TRAINED, "train.steps": 40, "train.ema_decay": 0.95}
    called = quick(data, workdir, **changes)
    assert called.code == 0, called.err
    return workdir
