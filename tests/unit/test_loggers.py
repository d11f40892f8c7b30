"""Services for metrics: refused at the start if they cannot start; later failures never end a run."""

import sys
from types import SimpleNamespace

import pytest

from distill.config.schema import LogSettings
from distill.run.loggers import TensorBoard, WeightsAndBiases, check_services
from tests.unit.refused import refused


@pytest.fixture
def wandb(monkeypatch):
    """Install a stand-in for the package. ``wandb.fails`` names the calls that raise."""
    calls, fails = [], set()

    def call(name):
        def called(*args, **settings):
            calls.append((name, settings.get("mode")) if name == "init" else name)
            if name in fails or calls[-1] in fails:
                raise RuntimeError(f"{name}\nfails")
            return SimpleNamespace(**{name: call(name) for name in ("define_metric", "log", "finish")})

        return called

    module = SimpleNamespace(calls=calls, fails=fails, **{name: call(name) for name in ("init", "teardown")})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_what_is_not_installed_is_refused(monkeypatch, service):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(f"log.{service}=true"):
        check_services(LogSettings(**{service: True}))
    check_services(LogSettings())


@pytest.mark.parametrize(
    ("fails", "logged", "warnings"),
    [(set(), 2, 0), ({("init", None)}, 2, 1), ({"init"}, 0, 2), ({"log"}, 1, 1)],
    ids=["nothing", "online", "offline too", "later"],
)
def test_its_failures_never_end_a_run(wandb, tmp_path, caplog, fails, logged, warnings):
    wandb.fails |= fails
    logger = WeightsAndBiases(tmp_path, "project", {})
    for step in (1, 2):
        logger.write(step, {"student/loss": 1.0})
    logger.close()
    assert wandb.calls.count("log") == logged
    assert len(caplog.records) == warnings, "each failure is said once"


def test_tensorboards_failures_never_end_a_run(monkeypatch, tmp_path, caplog):
    """Its writer's thread raises in the call after the one that failed: a full disk, a folder that is gone."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    logger = TensorBoard(tmp_path, 0)
    logger.write(1, {"student/loss": 1.0, "fake/loss": None})

    def full(*_args, **_settings):
        raise OSError(27, "File too large")

    monkeypatch.setattr(writer, "add_scalar", full)
    for step in (2, 3):
        logger.write(step, {"student/loss": 1.0})
    logger.close()
    assert len(caplog.records) == 1
