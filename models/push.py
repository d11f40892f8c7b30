"""Upload of an export to the Hugging Face hub: large files first, then one commit, so that no repository is half new.

The same command again sends only what is missing. A commit names its parent, so that it fails if somebody else has
changed the repository since it was looked at.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path, PurePosixPath
from typing import Any

from fsdp_cp.errors import UserError, counted, one_line
from fsdp_cp.files.atomic_folder import MANIFEST
from models.card import FILE as CARD
from models.card import is_ours
from models.files.shipped import is_hub_text

Content = Path | bytes
"""A file to send: its path, or its bytes."""


@dataclass(frozen=True)
class _Remote:
    """Newest commit of a repository."""

    commit: str
    files: Mapping[str, str]
    """Checksum of each file: SHA-256 of a large one, that of git's blob of any other."""
    earlier: frozenset[str]
    """Files of the export that it holds."""
    keeps_card: bool
    """Whether somebody has written or edited its card."""


def check_name(name: str) -> None:
    """Refuse a name that the hub does not take, and a push without login, before anything is exported."""
    from huggingface_hub import constants, get_token

    if not is_hub_text(name) or "@" in name:
        raise UserError(f"--push {name} must be owner/name, a repository on the hub")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push {name} needs the hub, and HF_HUB_OFFLINE is set; unset it")
    if get_token() is None:
        raise UserError(f"--push {name} needs a login; run hf auth login with a token that can write, or set HF_TOKEN")


def push(folder: Path, name: str, *, private: bool, replace: bool) -> str:
    """Upload the export in ``folder`` to the repository ``name``, a new or an existing one; return a description.

    Args:
        private: make a new repository private.
        replace: replace files without a question. Otherwise a terminal is asked.

    Raises:
        UserError: missing rights, a broken connection, or files that may not be replaced; the repository has not
            changed.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, files = HfApi(), _files_to_send(folder)
    try:
        remote = _open(api, name, private)
        if remote.keeps_card:
            files.pop(CARD)
        sent = {path: content for path, content in files.items() if not _is_there(content, remote.files.get(path))}
        stale = sorted((remote.earlier & remote.files.keys()) - files.keys() - {CARD})
        kept = f"; kept its {CARD}, which is not this program's" if remote.keeps_card else ""
        if not sent and not stale:
            return f"{name} has all files already{kept}"
        changed = [*sorted(sent.keys() & remote.files.keys()), *stale]
        if changed and not replace:
            _ask(name, changed)
        additions = [CommitOperationAdd(path, content) for path, content in sent.items()]
        api.preupload_lfs_files(name, additions, free_memory=False)
        api.create_commit(
            name,
            [*additions, *(CommitOperationDelete(path) for path in stale)],
            commit_message=f"Export of {folder.name}",
            parent_commit=remote.commit,
        )
    except UserError:
        raise
    except Exception as error:  # of the hub, or of the HTTP library, which changes with versions
        raise _refusal(error, name) from error
    return f"sent {counted(len(sent), 'file')} to {name}{kept}"


def _files_to_send(folder: Path) -> dict[str, Content]:
    """Return the files of an export by name. Its manifest is sent without times and without folders of this machine."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    places = {
        key: PurePosixPath(manifest["about"][key]).name for key in ("run", "checkpoint") if key in manifest["about"]
    }
    about = {**manifest["about"], **places}
    states = {name: [size, 0] for name, (size, _) in sorted(manifest["files"].items())}
    files: dict[str, Content] = {name: folder / name for name in states if (folder / name).is_file()}
    return {**files, MANIFEST: (json.dumps({"about": about, "files": states}, indent=1) + "\n").encode()}


def _open(api: Any, name: str, private: bool) -> _Remote:
    """Return the state of a repository, which is created if there is none."""
    from huggingface_hub import errors, hf_hub_download

    try:
        info = api.model_info(name, files_metadata=True)
    except errors.RepositoryNotFoundError:
        api.create_repo(name, private=private or None)
        info = api.model_info(name, files_metadata=True)
    if private and not info.private:
        raise UserError(f"--private: {name} exists and is public; change that in its settings, or leave it out")
    files = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in info.siblings or ()}
    texts = {
        path: Path(hf_hub_download(name, path, revision=info.sha)).read_text(encoding="utf-8")
        for path in (MANIFEST, CARD)
        if path in files
    }
    try:
        earlier = frozenset(json.loads(texts.get(MANIFEST, "{}")).get("files", ()))
    except (ValueError, AttributeError, TypeError):  # a file of this name that is not ours
        earlier = frozenset()
    return _Remote(str(info.sha), files, earlier, CARD in texts and not is_ours(texts[CARD]))


def _is_there(content: Content, checksum: str | None) -> bool:
    """Return whether a file of the repository with this ``checksum`` is equal."""
    from huggingface_hub.utils.sha import sha_fileobj

    if checksum is None:
        return False
    if len(checksum) == 64:
        if isinstance(content, bytes):
            return False
        with content.open("rb") as file:
            return sha_fileobj(file).hex() == checksum
    data = content if isinstance(content, bytes) else content.read_bytes()
    return sha1(b"blob %d\0" % len(data) + data).hexdigest() == checksum


def _ask(name: str, changed: list[str]) -> None:
    """Ask whether files may be replaced; refuse if there is nobody to ask."""
    what = f"{counted(len(changed), 'file')} of {name} ({', '.join(changed[:3])}{', ...' * (len(changed) > 3)})"
    if not sys.stdin.isatty():
        raise UserError(f"--push would replace {what}; add --yes, or give another name")
    if input(f"Replace {what}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError(f"--push: {name} was not changed")


def _refusal(error: Exception, name: str) -> UserError:
    """Return the message of an error of the hub or of the connection."""
    from huggingface_hub import errors

    status = None
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
    if status in (401, 403) or isinstance(error, errors.RepositoryNotFoundError):
        advice = "log in with a token that can write there: hf auth login"
        return UserError(f"--push: you have no right to write to {name}; {advice}")
    if status in (409, 412):
        return UserError(f"--push: {name} has changed meanwhile; start the same command again")
    sends = "nothing in it has changed; the same command sends what is missing"
    return UserError(f"--push: {name} did not take the export ({one_line(error)}); {sends}")
