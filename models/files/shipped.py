"""Lookup of files shipped with the project, from any working directory, and of those in the hub's cache."""

import re
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubName(NamedTuple):
    """Repository on the Hugging Face hub, and its revision: a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    @property
    def is_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


def find_shipped(path: str | Path) -> Path:
    """Return ``path``, or the same path in the project's folder if ``path`` is relative and exists only there.

    ``assets/quickstart_teacher`` thus means the shipped folder in any working directory. A path that exists in the
    working directory takes precedence. A name on the hub (:mod:`models.files.hub`) means its folder in the cache.
    """
    relative = Path(path)
    # Skip an empty setting: Path reads it as the working directory, so it would become the project's folder.
    if not relative.is_absolute() and relative.parts and ".." not in relative.parts and not relative.exists():
        shipped = PROJECT / relative
        if shipped.exists():
            return shipped
        if (name := parse_hub_name(str(path))) is not None and (folder := hub_folder(name)).is_dir():
            return folder
    return relative


def parse_hub_name(text: str) -> HubName | None:
    """Read ``owner/name`` or ``owner/name@revision``; ``None`` for any other text, and for a path that exists here."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or not is_hub_text(text) or Path(text).exists() or (PROJECT / text).exists():
        return None
    return HubName(match[1], match[2] or "main")


def is_hub_text(text: str) -> bool:
    """Return whether ``text`` reads as ``owner/name`` or ``owner/name@revision``, though it may be a path too."""
    return _HUB_NAME.fullmatch(text) is not None and ".." not in text


def hub_folder(name: HubName) -> Path:
    """Return the folder of a revision in the hub's cache, which may be missing."""
    from huggingface_hub import constants

    storage = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    commit = name.revision
    if not name.is_commit:
        branch = storage / "refs" / name.revision
        commit = branch.read_text().strip() if branch.is_file() else "unknown"
    return storage / "snapshots" / commit
