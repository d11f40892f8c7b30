"""Services for metrics: refused before anything expensive if they cannot start; later they never end a run."""

import sys
from types import SimpleNamespace

import pytest

from distill.config import LogSettings
from distill.run.loggers import WeightsAndBiases, check_services, log_in
from tests.unit.refused import refused


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, with ``wandb.fails`` as the names of the calls that raise."""
    calls, fails = [], set()

    def call(name):
        def called(*args, **settings):
            calls.append((name, settings.get("mode")) if name == "init" else name)
            if name in fails or calls[-1] in fails:
                raise RuntimeError(f"{name}\nfails")
            return SimpleNamespace(**{name: call(name) for name in ("define_metric", "log", "finish")})

        return called

    module = SimpleNamespace(calls=calls, fails=fails, **{name: call(name) for name in ("login", "init", "teardown")})
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_what_is_not_installed_is_refused(monkeypatch, service):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(f"log.{service}=true"):
        check_services(LogSettings(**{service: True}))
    check_services(LogSettings())


def test_without_a_key_the_settings_are_refused_in_one_line(wandb, monkeypatch):
    log_in(LogSettings())
    monkeypatch.setenv("RANK", "1")
    log_in(LogSettings(wandb=True))  # only rank 0 logs, and other nodes need no key
    assert wandb.calls == []
    monkeypatch.setenv("RANK", "0")
    log_in(LogSettings(wandb=True))
    wandb.fails.add("login")
    with refused("log.wandb=true"):
        log_in(LogSettings(wandb=True))


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
