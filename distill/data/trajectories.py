"""A teacher's trajectories on disk: ``FOLDER/settings.json``, and ``FOLDER/00000012.safetensors`` for each.

Files appear by ``os.replace``: a killed run leaves no half file under a trajectory's name, and the next one goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from distill.data import ClipDataset
from fsdp_cp.errors import UserError

_HINT = "make them with python -m distill.trajectories and the same settings"


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
            if saved.get(key) != value:
                raise UserError(
                    f"method.trajectories={self.path} was made with {key}={saved.get(key)}, not {value};"
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
            self._about.write_text(json.dumps(_plain(settings), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"method.trajectories={self.path} cannot be written ({error.strerror})") from error

    def missing(self, count: int, shape: tuple[int, ...]) -> list[int]:
        """Which of ``count`` trajectories with states of ``shape`` ``(K, C, T, H, W)`` are not there, or damaged."""
        return [i for i in range(count) if not self._holds(self.file(i), shape)]

    def _holds(self, file: Path, shape: tuple[int, ...]) -> bool:
        try:
            with safe_open(file, framework="pt") as content:
                return tuple(content.get_slice("states").get_shape()) == shape
        except (FileNotFoundError, SafetensorError):
            return False

    def file(self, index: int) -> Path:
        """Of trajectory ``index``."""
        return self.path / f"{index:08d}.safetensors"

    def write(self, index: int, states: Tensor, latents: Tensor, caption: str) -> None:
        """Write states ``(K, C, T, H, W)`` and the latents ``(C, T, H, W)`` that they lead to."""
        file = self.file(index)
        part = file.with_name(f".{file.stem}.{socket.gethostname()}.{os.getpid()}.tmp")
        tensors = {"states": states.float().cpu().contiguous(), "latents": latents.float().cpu().contiguous()}
        try:
            save_file(tensors, part, metadata={"caption": caption})
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)

    def read(self, index: int) -> tuple[Tensor, Tensor, str]:
        """fp32 states and latents, and the caption."""
        with safe_open(self.file(index), framework="pt") as content:
            return content.get_tensor("states"), content.get_tensor("latents"), content.metadata()["caption"]

    def settings(self) -> dict[str, Any]:
        """What the trajectories were made with.

        Raises:
            UserError: there are none.
        """
        try:
            return json.loads(self._about.read_text())
        except FileNotFoundError:
            raise UserError(f"method.trajectories={self.path} holds no trajectories; {_HINT}") from None
        except ValueError as error:
            raise UserError(f"{self._about} is not JSON ({error}); use another method.trajectories") from error


class TrajectoryClips:
    """The trajectories as a data set; all that is not an item's is that of ``data``, whose captions they have."""

    def __init__(self, folder: TrajectoryFolder, count: int, data: ClipDataset):
        self._folder, self._count, self._data = folder, count, data
        identity = json.dumps([folder.settings(), count, data.fingerprint]).encode()
        self.fingerprint = hashlib.sha256(identity).hexdigest()[:16]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """An item of ``data``, with the trajectory's end for latents, and ``trajectory`` ``(K, C, T, H, W)``."""
        states, latents, caption = self._folder.read(index)
        return {
            "latents": latents,
            "text": self._data.embed([caption])[0],
            "caption": caption,
            "trajectory": states,
        }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    return json.loads(json.dumps(settings))
