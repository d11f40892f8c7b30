"""The words of the command line, as Hydra's grammar takes them; what is not ours is refused in a sentence."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from distill.config.kinds import Setting
from fsdp_cp.errors import UserError
from fsdp_cp.paths import user_path

PATHS = ("run_dir", "checkpoint", "path", "encoders", "cache", "resume", "trajectories")
"""Last parts of the settings that name a file or a folder."""
_MAY_BE_EMPTY = ("negative_prompt",)
_SWITCHES = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_HYDRA_FLAGS = {
    "-m": "sweep",
    "--multirun": "sweep",
    "-i": "info",
    "--info": "info",
    "--hydra-help": "other",
    "-cn": "other",
    "--config-name": "other",
    "-cp": "other",
    "--config-path": "other",
    "-cd": "other",
    "--config-dir": "other",
    "-r": "other",
    "--run": "other",
    "-sc": "other",
    "--shell-completion": "other",
    "--experimental-rerun": "other",
    "-p": "other",
    "--package": "other",
    "--resolve": "other",
    "--version": "other",
}
_SENTENCES = {
    "sweep": "{flag}: a sweep has a configuration for each of its points; leave {flag} out, and show one of them",
    "info": "{flag} is Hydra's and does nothing here; use --cfg job for the composed configuration, or --help",
    "other": "{flag} is an option of Hydra's that train.py does not have; settings are key=value, see --help",
}


def wanted_information(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Whether ``--help``, ``--help all`` or ``--cfg job`` is asked for, and the other words.

    The first is ``"help"``, ``"help all"``, ``"cfg"`` or ``None``.

    Raises:
        UserError: an option of Hydra's that does nothing here, or no option at all.
    """
    wanted, words = None, []
    rest = iter(arguments)
    for word in rest:
        flag, _, value = word.partition("=")
        if flag in ("-h", "--help") and value in ("", "all"):
            wanted = f"help {value}".strip()
        elif word == "all" and wanted == "help":
            wanted = "help all"
        elif flag in ("-c", "--cfg"):
            value = value or next(rest, "")
            if value != "job":
                raise UserError(
                    f"{f'{flag} {value}'.strip()}: only the run's own configuration is shown; use --cfg job"
                )
            wanted = wanted or "cfg"
        elif flag in _HYDRA_FLAGS:
            raise UserError(_SENTENCES[_HYDRA_FLAGS[flag]].format(flag=flag))
        elif word.startswith("-"):
            key = flag.lstrip("-").replace("-", "_")
            value = value or next((w for w in rest if not w.startswith("-") and "=" not in w), "")
            like = f"{key}={value or 'VALUE'}" if key else "steps=100"
            raise UserError(f"{flag} is no option; settings are key=value, as in {like}; see --help")
        else:
            words.append(word)
    return wanted, words


def hydra_overrides(words: list[str], known: Mapping[str, list[Setting]]) -> list[str]:
    """``words`` with the strings quoted: paths and prompts may hold what Hydra's grammar reads otherwise.

    ``~`` at the beginning of a path is the home folder, which no shell puts in behind ``=``.

    Args:
        words: ``key=value``, with Hydra's ``+`` and ``++``.
        known: every setting by its key (:func:`distill.config.kinds.known_settings`).

    Raises:
        UserError: a word without ``=``, a deletion, a key of Hydra's own, a name that no setting has, an empty value
            where one is needed, a number for a switch.
    """
    return [_quoted(word, known) for word in words]


def _quoted(word: str, known: Mapping[str, list[Setting]]) -> str:
    typed, equals, value = word.partition("=")
    wrong = next((c for c in word if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if wrong is not None:  # an error of one line could not show it, nor a log
        what = "a line break" if wrong in "\n\r\u2028\u2029" else f"the character {wrong!r}"
        raise UserError(f"{typed.strip()[:60]!r} holds {what}; give it as plain text on one line")
    key = typed.lstrip("+")
    if typed.startswith("~"):
        raise UserError(f"{word}: a setting cannot be deleted; use {typed[1:]}=VALUE")
    if not equals:
        raise UserError(f"{word!r} is not key=value; leave no spaces around the =, and quote a value that has some")
    if re.match(r"hydra\b", key):
        what = "output goes to run_dir=FOLDER" if "dir" in key else "launchers are a sweep's, behind --multirun"
        raise UserError(f"{typed}= is a setting of Hydra's own, which does nothing here: {what}")
    if not re.fullmatch(r"[A-Za-z_]\w*([./][^\W.]+)*", key, re.ASCII) or typed not in (key, f"+{key}", f"++{key}"):
        raise UserError(f"{typed!r} in {word!r} is not the name of a setting; names are as optim.student.lr")
    if key not in known:
        return word
    if typed == f"+{key}":
        raise UserError(f"{word}: the setting is there already; use {word[1:]}")
    settings, last = known[key], key.rpartition(".")[2]
    if value == "" and last not in _MAY_BE_EMPTY:
        raise UserError(f"{key}= is empty (a shell variable that is not set?); give a value, or leave it out")
    if all(setting.types == (bool,) for setting in settings) and "${" not in value:
        if value.strip().lower() not in _SWITCHES:  # any number would be true
            raise UserError(f"{word[:200]} must be true or false")
    if not any(setting.is_text for setting in settings):
        return word
    if value == "null" or re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", value):
        return word
    if last in PATHS:
        path = user_path(value, key)
        value = str(path) if value.startswith("~") else value
    value = re.sub(r"(\\+)(?='|$)", lambda run: run.group(1) * 2, value)  # before a quote, and only there, they count
    value = value.replace("'", r"\'")
    return f"{typed}='{value}'"
