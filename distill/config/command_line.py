"""Command line of train.py: options, and words ``key=value`` in Hydra's grammar."""

from __future__ import annotations

import re
import unicodedata

from distill.config.kinds import Setting
from fsdp_cp.choices import user_path
from fsdp_cp.errors import UserError

PATHS = ("run_dir", "checkpoint", "path", "encoders", "cache", "resume")
"""Last parts of the keys of settings that take a path."""
_MAY_BE_EMPTY = ("negative_prompt",)


def wanted_information(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the option that ``arguments`` contain (``"help"``, ``"help all"``, ``"cfg"`` or ``None``) and the words.

    Raises:
        UserError: another option.
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
            if (value := value or next(rest, "")) != "job":
                raise UserError(f"{flag} {value}: train.py shows only the run's own configuration; use --cfg job")
            wanted = wanted or "cfg"
        elif word.startswith("-"):
            key = flag.lstrip("-").replace("-", "_") or "steps"
            raise UserError(f"unknown option {flag}; write settings as key=value, for example {key}=VALUE (see --help)")
        else:
            words.append(word)
    return wanted, words


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of a word, without Hydra's ``+`` or ``++``.

    Raises:
        UserError: a word without ``=``, a deletion, a control character or line break, an empty value.
    """
    key, equals, value = word.partition("=")
    wrong = next((c for c in word if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if wrong is not None:
        raise UserError(f"{key.strip()[:60]!r} contains the character {wrong!r}; give it as plain text on one line")
    if key.startswith("~"):
        raise UserError(f"{word}: a setting cannot be deleted; use {key[1:]}=VALUE")
    if not equals:
        raise UserError(f"{word!r} is not key=value; leave no spaces around the =, and quote a value that has some")
    key = key.lstrip("+")
    if value == "" and key.rpartition(".")[2] not in _MAY_BE_EMPTY:
        raise UserError(f"{key}= is empty (a shell variable that is not set?); give a value, or leave it out")
    return key, value


def in_grammar(key: str, value: str, setting: Setting) -> str:
    """Return ``key=value`` in Hydra's grammar, with quotes around text, so that users can type paths and prompts bare.

    Expand ``~`` at the start of a path: the shell does not expand it after ``=``.
    """
    if not setting.is_text or value == "null" or re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", value):
        return f"{key}={value}"
    if key.rpartition(".")[2] in PATHS:
        path = user_path(value, key)
        value = str(path) if value.startswith("~") else value
    value = re.sub(r"(\\+)(?='|$)", lambda run: run.group(1) * 2, value)  # backslashes count only before a quote
    value = value.replace("'", r"\'")
    return f"{key}='{value}'"
