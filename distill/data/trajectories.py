"""A teacher's trajectories on disk: ``FOLDER/settings.json``, and ``FOLDER/00000012.safetensors`` for each.

Files appear by ``os.replace``: a killed run leaves no half file under a trajectory's name, and the next one goes on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from distill.data import ClipDataset
from fsdp_cp.errors import UserError
from models.files.checkpoint_files import fingerprint_of
from models.roles.condition import has_image

log = logging.getLogger(__name__)
_HINT = "make them with python -m distill.trajectories and the same settings"
NOTED_LATER = ("fps", "max_text_tokens", "image")
"""Settings of data that folders of earlier versions do not note: LTX's coordinates follow from the frame rate, what
captions are filled up to is seen, and an image is a condition."""


class TrajectoryFolder:
    """The folder ``method.trajectories``. Nothing is read before a method asks for it."""

    def __init__(self, path: str):
        self.path = Path(path)
        self._about = self.path / "settings.json"

    def check(self, settings: dict[str, Any]) -> None:
        """Compare ``settings``, by name, with what the trajectories were made with.

        Raises:
            UserError: another value, or no trajectories.
        """
        saved = self.settings()
        for key, value in _plain(settings).items():
            if key not in saved and key.removeprefix("data.") in NOTED_LATER:
                continue
            if saved.get(key) != value:
                raise UserError(
                    f"method.trajectories={self.path} was made with {key}={_shown(saved.get(key))}, not {value};"
                    " use that, or another folder"
                )

    def check_complete(self, count: int) -> None:
        """Are there ``count`` trajectories?

        Raises:
            UserError: one is missing.
        """
        there = {file.name for file in self.path.glob("*.safetensors")}
        missing = next((i for i in range(count) if self.file(i).name not in there), None)
        if missing is not None:
            raise UserError(
                f"method.trajectories={self.path} lacks {self.file(missing).name} of"
                f" method.num_trajectories={count}; {_HINT}, which goes on with what is there"
            )

    def begin(self, settings: dict[str, Any]) -> None:
        """Note what the trajectories to come are made with; the same as before, if there are any.

        Raises:
            UserError: other settings before, or a folder that cannot be written.
        """
        if self._about.exists():
            self.check(settings)
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            foreign = next((p.name for p in sorted(self.path.iterdir()) if not p.name.startswith(".")), None)
            if foreign is not None:
                raise UserError(
                    f"method.trajectories={self.path} is no folder of trajectories, and holds {foreign}; give an empty"
                    " or a new one"
                )
            part = self._about.with_name(f".{self._about.name}.{socket.gethostname()}.{os.getpid()}.tmp")
            try:
                part.write_text(json.dumps(_plain(settings), indent=2) + "\n")
                os.replace(part, self._about)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    def missing(self, count: int, shape: tuple[int, ...]) -> list[int]:
        """Which of ``count`` trajectories with states of ``shape`` ``(K, C, T, H, W)`` are not there, or damaged."""
        return [i for i in range(count) if not self._holds(self.file(i), shape)]

    def _holds(self, file: Path, shape: tuple[int, ...]) -> bool:
        if not file.exists():
            return False
        try:
            states, _, _ = _read(file)
        except _Damaged as error:
            log.warning("%s is damaged (%s); it is made again", file, error)
            return False
        if states.shape != shape:
            log.warning("%s holds states of shape %s, not %s; it is made again", file, tuple(states.shape), shape)
        return states.shape == shape

    def file(self, index: int) -> Path:
        """Of trajectory ``index``."""
        return self.path / f"{index:08d}.safetensors"

    def write(self, index: int, states: Tensor, latents: Tensor, caption: str) -> None:
        """Write states ``(K, C, T, H, W)`` and the latents ``(C, T, H, W)`` that they lead to.

        Raises:
            UserError: a full disk, or a folder that can only be read.
        """
        file = self.file(index)
        part = file.with_name(f".{file.stem}.{socket.gethostname()}.{os.getpid()}.tmp")
        tensors = {"states": states.float().cpu().contiguous(), "latents": latents.float().cpu().contiguous()}
        try:
            try:
                part.write_bytes(save(tensors, metadata={"caption": caption}))
                os.replace(part, file)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"method.trajectories={self.path} cannot be written ({error.strerror}); use a folder with space for them"
        )

    def read(self, index: int) -> tuple[Tensor, Tensor, str]:
        """fp32 states and latents, and the caption.

        Raises:
            UserError: a damaged file.
        """
        try:
            return _read(self.file(index))
        except _Damaged as error:
            raise UserError(
                f"method.trajectories: {self.file(index)} is damaged ({error}); remove it and {_HINT}, which makes what"
                " is missing"
            ) from error

    def content(self) -> str:
        """Return a fingerprint of the settings and of the first trajectory, which another teacher would change."""
        return fingerprint_of(file for file in (self._about, self.file(0)) if file.is_file())

    def settings(self) -> dict[str, Any]:
        """What the trajectories were made with.

        Raises:
            UserError: there are none.
        """
        try:
            settings = json.loads(self._about.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"method.trajectories={self.path} holds no trajectories; {_HINT}") from None
        except OSError as error:
            raise UserError(f"method.trajectories: {self._about} cannot be read ({error.strerror})") from error
        except (ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self._about} is not JSON ({reason}); use another method.trajectories") from error
        if not isinstance(settings, dict):
            raise UserError(f"{self._about} is not a JSON object; use another method.trajectories")
        return settings


class TrajectoryClips:
    """The trajectories as a data set; all that is not an item's is that of ``data``, whose captions they have."""

    def __init__(self, folder: TrajectoryFolder, count: int, data: ClipDataset):
        self._folder, self._count, self._data = folder, count, data
        made_with = folder.settings()
        if has_image(data.condition_shapes) and made_with.get("data.fingerprint") != data.fingerprint:
            raise UserError(  # which clip's image belongs to a trajectory, its caption does not tell
                f"method.trajectories={folder.path} were made of other clips than those of data.path now, whose images"
                " are their conditions; make them again in another folder"
            )
        identity = json.dumps([folder.settings(), count, data.fingerprint]).encode()
        self.fingerprint = hashlib.sha256(identity).hexdigest()[:16]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An item of ``data``, with the trajectory's end for latents, and ``trajectory`` ``(K, C, T, H, W)``."""
        states, latents, caption = self._folder.read(index)
        condition = self._data.condition([caption], [index % len(self._data)])
        return {
            "latents": latents,
            "caption": caption,
            "trajectory": states,
            **{name: value[0] for name, value in condition.tensors.items()},
        }


class _Damaged(Exception):
    """This file holds no trajectory; the message is the reason."""


def _read(file: Path) -> tuple[Tensor, Tensor, str]:
    """fp32 states and latents, and the caption. Raises ``_Damaged``."""
    try:
        content = file.read_bytes()  # not mapped: a file that shrinks would end the process
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        states, latents, caption = tensors["states"], tensors["latents"], header["__metadata__"]["caption"]
    except OSError as error:
        raise _Damaged(str(error.strerror)) from error
    except (SafetensorError, KeyError, TypeError) as error:
        raise _Damaged(" ".join(f"{type(error).__name__} {error}".split())[:200]) from error
    if states.ndim != 5 or states.shape[1:] != latents.shape or {states.dtype, latents.dtype} != {torch.float32}:
        raise _Damaged(f"states {tuple(states.shape)} {states.dtype}, latents {tuple(latents.shape)} {latents.dtype}")
    if not (states.isfinite().all() and latents.isfinite().all()):
        raise _Damaged("numbers that are not finite")
    return states, latents, caption


def _shown(value: Any) -> str:
    return " ".join(str(value).split())[:200]


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(settings))
