"""Whether Weights & Biases can log without asking for a key: looked up where wandb looks, without starting it."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

_HOST = "https://api.wandb.ai"
_NO_KEY_NEEDED = ("offline", "dryrun", "disabled")


def can_log(environment: Mapping[str, str] | None = None) -> bool:
    """Whether ``wandb.init`` finds a key, or is told by the mode that it needs none.

    In the order of wandb: ``WANDB_*`` of ``environment`` (of this process by default), ``./wandb/settings`` and
    ``~/.config/wandb/settings`` (where ``wandb offline`` and ``wandb login`` write), ``~/.netrc``. Whether the server
    takes the key is not asked.
    """
    env = os.environ if environment is None else environment
    settings = _settings(env)
    if settings.get("mode", "online") in _NO_KEY_NEEDED:
        return True
    if settings.get("api_key") or settings.get("identity_token_file"):
        return True
    return _in_netrc(env, settings.get("base_url") or _HOST)


def _settings(env: Mapping[str, str]) -> dict[str, str]:
    """The settings that matter here; the environment stands above the files, this folder's file above the user's."""
    home = Path(os.path.expanduser(env.get("WANDB_CONFIG_DIR") or "~/.config/wandb"))
    found: dict[str, str] = {}
    here = Path(env.get("WANDB_DIR") or ".")
    for path in (home / "settings", here / (".wandb" if (here / ".wandb").exists() else "wandb") / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
            found |= dict(parser["default"]) if "default" in parser else {}
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # wandb warns of it and goes on without
    for name in ("mode", "api_key", "identity_token_file", "base_url"):
        if env.get(f"WANDB_{name.upper()}"):
            found[name] = env[f"WANDB_{name.upper()}"]
    return found


def _in_netrc(env: Mapping[str, str], url: str) -> bool:
    """Whether there is a password for the server, in the file that wandb takes."""
    paths = [Path(os.path.expanduser(env.get("NETRC") or "~/.netrc")), Path(os.path.expanduser("~/_netrc"))]
    path = next((path for path in paths if path.exists()), None)
    try:
        entry = netrc.netrc(path).authenticators(urlsplit(url).netloc) if path is not None else None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return False
    return bool(entry and entry[2])
