"""Event files: the same numbers under the same names, if tensorboardX is there."""

import sys

import pytest
from fake_tensorboard import install

from transformer_jax.config import ConfigError
from transformer_jax.tensorboard import EventFiles, require_tensorboard


@pytest.fixture
def made(monkeypatch):
    return install(monkeypatch)


def test_reports_become_scalars(made, tmp_path):
    require_tensorboard(tmp_path)
    writer = EventFiles(tmp_path / "events", resumed_step=7)
    writer.write(9, loss=0.5, learning_rate=1)
    writer.close()
    (only,) = made
    # What a start before wrote of step 8 and later is hidden.
    assert only.settings["logdir"] == str(tmp_path / "events")
    assert only.settings["purge_step"] == 8
    expected = [("loss", 0.5, 9), ("learning_rate", 1.0, 9), "close"]
    assert only.calls == expected
    assert isinstance(only.calls[1][1], float)


def test_missing_package_is_refused_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"pip install .transformer-jax\[tensorboard\]"
    ):
        require_tensorboard(tmp_path)


def test_object_store_is_refused(made):
    with pytest.raises(ConfigError, match=r"local folders, not to gs://bucket/run"):
        require_tensorboard("gs://bucket/run")


def test_real_event_file_names_its_values(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = EventFiles(tmp_path / "events", resumed_step=0)
    writer.write(3, validation_loss=0.5)
    writer.close()
    (file,) = (tmp_path / "events").iterdir()
    assert b"validation_loss" in file.read_bytes()
