"""Whether Weights & Biases has a key: refused in one line before anything is built where it has none."""

import pytest

from distill.config import LogSettings
from distill.loggers import check_services
from distill.wandb_login import can_log
from tests.unit.refused import refused

KEY = "a" * 40
NAMES = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR", "WANDB_DIR",
         "NETRC")  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's home, and the folder that the command is typed in, without anything of wandb's."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "home"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def nothing(home):
    pass


def netrc_of(host):
    return lambda home: write(home / ".netrc", f"machine {host}\n  login user\n  password {KEY}\n")


def settings_in(where, *lines):
    return lambda home: write(home / where, "[default]\n" + "\n".join(lines) + "\n")


CASES = {
    "nothing": (nothing, {}, False),
    "key": (nothing, {"WANDB_API_KEY": KEY}, True),
    "identity token": (nothing, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, True),
    "offline": (nothing, {"WANDB_MODE": "offline"}, True),
    "online": (nothing, {"WANDB_MODE": "online"}, False),
    "netrc": (netrc_of("api.wandb.ai"), {}, True),
    "another host's netrc": (netrc_of("github.com"), {}, False),
    "netrc of an own server": (netrc_of("wandb.example:8080"), {"WANDB_BASE_URL": "http://wandb.example:8080"}, True),
    "netrc of the public one alone": (netrc_of("api.wandb.ai"), {"WANDB_BASE_URL": "http://wandb.example"}, False),
    "netrc without password": (lambda home: write(home / ".netrc", "machine api.wandb.ai login user\n"), {}, False),
    "damaged netrc": (lambda home: write(home / ".netrc", "machine api.wandb.ai ???\n"), {}, False),
    "netrc that is no text": (lambda home: (home / ".netrc").write_bytes(b"\xff\xfe\x00"), {}, False),
    "offline for the user": (settings_in(".config/wandb/settings", "mode = offline"), {}, True),
    "online in the environment": (settings_in(".config/wandb/settings", "mode = offline"), {"WANDB_MODE": "online"},
                                  False),
    "key in settings": (settings_in(".config/wandb/settings", f"api_key = {KEY}"), {}, True),
    "damaged settings": (lambda home: write(home / ".config/wandb/settings", "mode offline ]["), {}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_key_is_looked_for_where_wandb_looks(home, monkeypatch, case):
    prepare, environment, expected = CASES[case]
    prepare(home)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert can_log() is expected


def test_without_a_key_the_settings_are_refused_in_one_line(home, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if installed
    with refused("log.wandb=true"):
        check_services(LogSettings(wandb=True))
    monkeypatch.setenv("RANK", "1")
    check_services(LogSettings(wandb=True))  # only rank 0 logs, and other nodes need no key
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_services(LogSettings(wandb=True))
    check_services(LogSettings())


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_what_is_not_installed_is_refused(home, monkeypatch, service):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused(f"log.{service}=true"):
        check_services(LogSettings(**{service: True}))
