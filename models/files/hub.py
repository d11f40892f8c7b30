"""Checkpoints by their name on the Hugging Face hub: ``owner/name`` or ``owner/name@revision``.

A command resolves such a name once, at its start, to ``owner/name@COMMIT``, and downloads the files that it needs.
:func:`models.files.shipped.find_shipped` finds them in the cache, without a network. Only settings, weights in
safetensors and vocabularies are downloaded: no code, and nothing to unpickle.
"""

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist

from fsdp_cp.errors import UserError, one_line
from fsdp_cp.launch import local_rank, process_group, world_size
from fsdp_cp.reduce import on_all_ranks, on_first_rank
from models.files.checkpoint_files import SUFFIXES, indexed_files
from models.files.fastvideo import FILE as FASTVIDEO_FILE
from models.files.shipped import HubName, find_shipped, hub_folder, is_hub_text, parse_hub_name

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=7)
"""Time in which the other processes wait for downloads, without NCCL."""

CARD = "README.md"
Wanted = Callable[[Iterable[str]], list[str]]
"""Function that selects the needed files from those of a repository."""


def network_files(files: Iterable[str]) -> list[str]:
    """Select the files of a role's network: ``transformer/`` and ``transformer_2/``, or those outside of folders; the
    card, which tells the license; and FastVideo's file, which tells the sparsity."""
    files = [file for file in files if file.endswith((".json", ".safetensors")) or file == CARD]
    if "transformer/config.json" in files:
        wanted = ("model_index.json", CARD, FASTVIDEO_FILE, "transformer/", "transformer_2/")
        return [file for file in files if file.startswith(wanted)]
    return [file for file in files if "/" not in file]


def encoder_files(files: Iterable[str]) -> list[str]:
    """Select the files of a pipeline's encoders: all of its folders except the networks and schedulers."""
    networks = ("transformer", "transformer_2", "transformer_ref", "scheduler", "audio_scheduler")
    parts = [(file, PurePosixPath(file).parts) for file in files if file.endswith(SUFFIXES)]
    return [file for file, path in parts if file == "model_index.json" or (len(path) == 2 and path[0] not in networks)]


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """Commit of a repository that all nodes take, and its needed files."""

    setting: str
    where: str
    """Setting and value, for messages."""
    name: HubName
    commit: str
    files: tuple[str, ...] | None
    """``None`` if the hub could not be asked: those in the cache."""
    is_head: bool = False
    """Whether the commit is the revision's newest, which the cache may record."""

    @property
    def folder(self) -> Path:
        return hub_folder(HubName(self.name.repo, self.commit))

    def missing(self, optional: Collection[str] = (CARD,)) -> list[str]:
        """Return the needed files that are not in the cache. Without the card everything runs."""
        return [file for file in self.files or () if file not in optional and not (self.folder / file).is_file()]

    def check(self) -> None:
        """Check that the cache holds the needed files, and every shard that an index of weights names."""
        if missing := self.missing():
            raise UserError(f"{self.where} lacks {missing[0]} in {self.folder}; start again with a network")
        for index in sorted(self.folder.glob("**/*.safetensors.index*.json")):
            if self.files is None or index.relative_to(self.folder).as_posix() in self.files:
                indexed_files(index, f"{self.where} in {self.folder}")


def resolve(
    names: Mapping[str, tuple[str | None, Wanted]], *, recorded: Mapping[str, str] | None = None, download: bool = True
) -> dict[str, str]:
    """Resolve the hub names among settings to ``owner/name@COMMIT``, and download their files. All ranks must call it.

    Rank 0 asks the hub, and all nodes take its commits. One process of each node downloads, with a progress
    bar. Without a network a snapshot in the cache is used. A mistake or a failed download raises on all ranks.

    ``names`` has the value of each setting, and the files that it needs; values that are paths here are left out.
    ``recorded`` are values that an earlier start of the run resolved: a branch that has moved since is reported.
    Return the new values of the settings that are hub names.
    """
    parsed = {setting: (text, parse_hub_name(text), wanted) for setting, (text, wanted) in names.items() if text}
    named = {setting: (text, name, wanted) for setting, (text, name, wanted) in parsed.items() if name is not None}
    # Nodes may not see the same paths. All ranks must come here or none, so the text decides, then rank 0.
    several_nodes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) < world_size()
    if not (any(is_hub_text(text) for text, *_ in parsed.values()) if several_nodes else named):
        return {}

    earlier = recorded or {}

    def look_up() -> list[_Snapshot]:
        return [
            _look_up(setting, text, name, parse_hub_name(earlier.get(setting, "")), wanted)
            for setting, (text, name, wanted) in named.items()
        ]

    def fetch() -> None:
        for snapshot in snapshots if local_rank() == 0 else ():
            _fetch(snapshot, download)

    def check() -> None:
        for snapshot in snapshots:
            snapshot.check()

    alone = dist.is_initialized() or world_size() == 1
    with nullcontext() if alone else process_group(torch.device("cpu"), timeout=_PATIENCE):
        snapshots = on_first_rank(look_up)
        on_all_ranks(fetch)
        on_all_ranks(check)
    return {snapshot.setting: f"{snapshot.name.repo}@{snapshot.commit}" for snapshot in snapshots}


def resolve_path(text: str, setting: str, wanted: Wanted) -> Path:
    """Return the folder of one path or hub name, as :func:`find_shipped`, after :func:`resolve`."""
    return find_shipped(resolve({setting: (text, wanted)}).get(setting, text))


def _look_up(setting: str, text: str, name: HubName, earlier: HubName | None, wanted: Wanted) -> _Snapshot:
    """Return the commit to take: the recorded one of the same repository, or the revision's."""
    from huggingface_hub import HfApi

    where, kept = f"{setting}={text}", None
    if earlier is not None and earlier.repo == name.repo and not name.is_commit:
        kept = earlier.revision
    try:
        head = info = HfApi().model_info(name.repo, revision=name.revision)
        if kept not in (None, head.sha):
            log.warning("%s: %s has moved to %s; this run continues with %s", where, name.revision, head.sha, kept)
            info = HfApi().model_info(name.repo, revision=kept)
    except Exception as error:  # of the hub, or of the HTTP library, which changes with versions
        if (refusal := _refusal(error, name, where)) is not None:
            raise refusal from error
        folder = hub_folder(HubName(name.repo, kept or name.revision))
        if not folder.is_dir():
            asked = f"is neither a folder here nor in the cache, and the hub cannot be asked ({one_line(error)})"
            raise UserError(f"{where} {asked}; give a folder, or start once with a network") from error
        return _Snapshot(setting=setting, where=where, name=name, commit=folder.name, files=None)
    files = wanted(file.rfilename for file in info.siblings or ())
    weights = [file for file in files if file.endswith(".safetensors")]  # one alone can be a file of adapters
    if len(weights) != 1 and not any(file.endswith("config.json") for file in files):
        raise UserError(f"{where}: the repository has no diffusers files of this kind; give one in diffusers' format")
    is_head = kept in (None, head.sha)
    return _Snapshot(setting=setting, where=where, name=name, commit=str(info.sha), files=tuple(files), is_head=is_head)


def _refusal(error: Exception, name: HubName, where: str) -> UserError | None:
    """Return the message of an error that the hub answers; ``None`` if it cannot be asked now."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            advice = f"accept its terms at https://huggingface.co/{name.repo}, then log in with: hf auth login"
            return UserError(f"{where} is gated; {advice}")
        case errors.RevisionNotFoundError():
            return UserError(f"{where}: {name.repo} has no revision {name.revision}; give another")
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            advice = "check the path, or the name (for a private one log in with: hf auth login)"
            return UserError(f"{where} is neither a folder here nor a repository on the hub for you; {advice}")
        case errors.HfHubHTTPError() if error.response is not None and error.response.status_code < 500:
            return UserError(f"{where}: the hub refused ({one_line(error)}); try again, or give a folder")
    return None


def _fetch(snapshot: _Snapshot, download: bool) -> None:
    """Download the missing files of a snapshot. Processes that share the cache wait for each other's files there."""
    from huggingface_hub import snapshot_download

    if not (missing := snapshot.missing(optional=() if download else (CARD,))):
        return
    repo = snapshot.name.repo
    if not download:
        advice = f"start the run, or download it first: hf download {repo} --revision {snapshot.commit}"
        raise UserError(f"{snapshot.where} is not whole in the cache; dry_run and plan download nothing; {advice}")
    storage = snapshot.folder.parents[1]
    try:
        log.info("%s: downloading %d files of commit %s", snapshot.where, len(missing), snapshot.commit)
        patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in missing]
        snapshot_download(repo, revision=snapshot.commit, allow_patterns=patterns)
        if snapshot.is_head and not snapshot.name.is_commit:  # the hub's layout: the branch is this commit now
            branch = storage / "refs" / snapshot.name.revision
            branch.parent.mkdir(parents=True, exist_ok=True)
            branch.write_text(snapshot.commit)
    except Exception as error:  # of the hub, the HTTP library and the disk
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        advice = "free space, or set HF_HOME to another disk" if full else "the same command continues the download"
        raise UserError(f"{snapshot.where} was not downloaded to {storage} ({one_line(error)}); {advice}") from error
