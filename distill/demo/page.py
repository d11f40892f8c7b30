"""The page, by gradio. Its handlers run in threads of rank 0; they decode and write what all ranks sample."""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from distill.data.base import IMAGES
from distill.demo.studio import Made, Order, Studio
from distill.evaluate.networks import RoleName
from distill.evaluate.sampling import Clips, StreamDecoder, sample_captions, speed_in_words
from distill.report.media import write_clips, write_webp
from fsdp_cp.errors import UserError, counted
from fsdp_cp.runtime.packages import optional_package
from models.sample import AUDIO

SHOWN = 8
"""Clips in the history of a tab."""
_KEPT = 256
"""Files of a kind on the disk, of all tabs: chunks of a long clip leave the clips of the history."""
_TICK = 2.0
"""Seconds between a page's questions whether there are still clips."""
_MOST_SEED = 2**53
"""A browser's numbers are exact up to here."""
_CSS = f"#history .grid-container {{grid-template-columns: repeat({SHOWN}, 1fr) !important}}"
"""Few clips stay small."""
_DONE = "Done. The files are temporary: download what you keep."


def import_gradio(folder: Path) -> ModuleType:
    """Import gradio, without telemetry, with its files in ``folder``."""
    # It asks matplotlib for its backend at each call: without a name, the first clip waits for pyplot.
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": str(folder), "MPLBACKEND": "agg"}
    gradio = optional_package("gradio", "pip install 'fsdp-cp[demo]'", "gradio", "6.31")
    if isinstance(gradio, str):
        raise UserError(f"python -m distill.demo needs gradio, which {gradio}")
    return gradio


class _Clip:
    """A network's clip while it is made."""

    def __init__(self, studio: Studio, role: RoleName, steps: int) -> None:
        self._decoder, self._studio = StreamDecoder(studio.data), studio
        self.role, self._steps = role, steps
        self._pieces: list[Clips] = []
        self._times = [0.0]

    def add(self, made: Made) -> np.ndarray:
        """Decode the next chunk; return its frames (T, H, W, 3)."""
        self._pieces.append(self._decoder.decode(made.latents))
        is_causal = self._studio.is_causal(self.role)
        self._times.append((time.perf_counter() if is_causal else made.end) - made.start)
        return self._pieces[-1].frames[0]

    def words(self) -> str:
        frames = sum(piece.frames.shape[1] for piece in self._pieces)
        is_causal = self._studio.is_causal(self.role)
        speed = speed_in_words(np.diff(self._times), frames) if is_causal else f"{self._times[-1]:.3g} s"
        return f"{counted(self._steps, 'step')}, {counted(frames, 'frame')}: {speed}"

    def write(self, file: Path) -> None:
        """Write a clip of all chunks so far."""
        frames = np.concatenate([piece.frames for piece in self._pieces], axis=1)
        write_clips([file], frames, self._pieces[-1].sounds, fps=self._studio.data.fps)


class Page:
    """The page of a studio. The text of users reaches the browser only as values of text fields, never as HTML."""

    def __init__(self, gradio: ModuleType, studio: Studio, folder: Path, title: str) -> None:
        self._gradio, self._studio, self._folder = gradio, studio, folder
        self._running: dict[str, threading.Event] = {}
        self._files: dict[str, deque[Path]] = {}
        with gradio.Blocks(title=title, analytics_enabled=False) as self._blocks:
            gradio.Markdown(f"# {title}")
            with gradio.Row():
                with gradio.Column(scale=2):
                    self._ask()
                with gradio.Column(scale=3):
                    self._show()
            self._gallery = gradio.Gallery(
                label="Last clips",
                columns=SHOWN,
                height=260,
                interactive=False,
                buttons=["download"],
                elem_id="history",
            )
            self._history = gradio.State([])
            self._answer()

    def _ask(self) -> None:
        gradio, studio = self._gradio, self._studio
        self._caption = gradio.Textbox(
            sample_captions(studio.data, 1)[0], label="Caption", lines=3, max_lines=8, elem_id="caption"
        )
        names = IMAGES[studio.encoding.image] if studio.encoding.image else ()
        self._images = [
            gradio.Image(label=name.replace("_", " ").capitalize(), type="filepath", sources=["upload"], format="png")
            for name in names
        ]

        def number(value: int, label: str, name: str) -> Any:
            return gradio.Number(value, label=label, precision=0, elem_id=name)

        with gradio.Row():
            self._seed = number(0, "Seed", "seed")
            self._steps = {
                role: number(network.steps, f"Steps of the {role}", f"steps_{role}")
                for role, network in studio.networks.items()
            }
            is_causal = studio.is_causal("student")
            self._frames = number(studio.encoding.num_frames, "Frames of the student", "frames") if is_causal else None
        with gradio.Row():
            self._sample = gradio.Button("Sample", variant="primary", elem_id="sample")
            self._stop = gradio.Button("Stop", variant="stop", elem_id="stop")
        self._status = gradio.Textbox(label="Status", interactive=False, lines=2, elem_id="status")
        self._live = {
            role: gradio.Image(
                label=f"Newest chunk of the {role}", interactive=False, buttons=[], height=256, elem_id=f"live_{role}"
            )
            for role in studio.networks
            if studio.is_causal(role)
        }

    def _show(self) -> None:
        gradio, studio = self._gradio, self._studio
        self._videos: dict[str, Any] = {}
        self._speeds: dict[str, Any] = {}
        with gradio.Row():
            for role in studio.networks:
                with gradio.Column(min_width=200):
                    self._videos[role] = gradio.Video(
                        label=role.capitalize(), interactive=False, buttons=["download"], height=320, loop=True,
                        autoplay=AUDIO not in studio.data.latent_shapes, elem_id=f"video_{role}",
                    )  # fmt: skip
                    self._speeds[role] = gradio.Textbox(
                        label="Time", interactive=False, lines=2, elem_id=f"speed_{role}"
                    )

    def _answer(self) -> None:
        gradio = self._gradio
        asked = {self._caption, self._seed, *self._steps.values(), *self._images, self._history}
        asked |= set() if self._frames is None else {self._frames}
        shown = [self._status, *self._live.values(), *self._videos.values(), *self._speeds.values()]
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

        def sample(values: dict[Any, Any], request: gradio.Request) -> Iterator[dict[Any, Any]]:
            yield from self._sampled(values, str(request.session_hash))

        def stop(request: gradio.Request) -> None:
            if (stopped := self._running.get(str(request.session_hash))) is not None:
                stopped.set()

        def tick() -> list[Any]:
            reason = self._studio.ended
            return [gradio.skip()] * 2 if reason is None else [f"The end: {reason}", gradio.Timer(active=False)]

        self._sample.click(
            sample, asked, [*shown, self._gallery, self._history],
            show_progress="hidden", concurrency_limit=None, api_visibility="private",
        )  # fmt: skip
        self._stop.click(stop, **quick)
        self._blocks.unload(stop)
        timer = gradio.Timer(_TICK)
        timer.tick(tick, None, [self._status, timer], **quick)

    def launch(self, host: str, port: int) -> str:
        """Serve the page; return its address."""
        off = dict.fromkeys(("share", "ssr_mode", "pwa", "mcp_server", "run_history", "enable_monitoring"), False)
        _, address, _ = self._blocks.queue(max_size=None).launch(
            server_name=host, server_port=port, prevent_thread_lock=True, quiet=True, inbrowser=False,
            max_file_size="64mb", footer_links=[], css=_CSS, **off,
        )  # fmt: skip
        return address

    def close(self) -> None:
        """End the page, once its tabs have read why."""
        time.sleep(2 * _TICK)
        self._blocks.close(verbose=False)

    # ---------------------------------------------------------------- a press of the button

    def _sampled(self, values: Mapping[Any, Any], session: str) -> Iterator[dict[Any, Any]]:
        """Make the clips that ``values`` ask for; yield the values of components that change."""
        stopped = self._running[session] = threading.Event()
        history, clips = list(values[self._history]), {}
        yield {self._status: "Reading the caption.", **dict.fromkeys(self._speeds.values(), "")}
        try:
            order = self._order(values)
            for made in self._studio.clips(order, stopped):
                if isinstance(made, int):
                    yield {self._status: f"Waiting for {counted(made, 'clip')} of other tabs."}
                elif made.latents is None:
                    yield self._finished(clips.pop(made.role), order, history)
                else:
                    clip = clips.setdefault(made.role, _Clip(self._studio, made.role, order.steps[made.role]))
                    yield self._shown(clip, made)
            for clip in clips.values():  # stopped in the middle
                yield self._finished(clip, order, history)
            yield {self._status: "Stopped." if stopped.is_set() else _DONE}
        except (UserError, OSError) as error:
            yield {self._status: f"Error: {error}"}
        finally:
            self._running.pop(session, None)

    def _order(self, values: Mapping[Any, Any]) -> Order:
        def whole(component: Any, most: int = 2**31) -> int:
            value = values[component]
            if value is None or not abs(value) <= most:
                raise UserError(f"{component.label} must be a number of at most {most}, got {value}")
            return int(value)

        return Order(
            caption=values[self._caption] or "",
            steps={role: whole(number) for role, number in self._steps.items()},
            images=tuple(values[image] for image in self._images),
            seed=whole(self._seed, _MOST_SEED),
            frames=None if self._frames is None else whole(self._frames),
        )

    def _shown(self, clip: _Clip, made: Made) -> dict[Any, Any]:
        frames = clip.add(made)
        changed = {self._status: "Sampling.", self._speeds[clip.role]: clip.words()}
        if clip.role in self._live:
            file = self._file(f"{clip.role}_chunk", "webp")
            write_webp(file, frames, self._studio.data.fps)
            changed[self._live[clip.role]] = str(file)
        return changed

    def _finished(self, clip: _Clip, order: Order, history: list[tuple[str, str]]) -> dict[Any, Any]:
        file = self._file(clip.role, "mp4")
        clip.write(file)
        history.insert(0, (str(file), f"{clip.role}, seed {order.seed}: {order.caption}"))
        del history[SHOWN:]
        return {
            self._videos[clip.role]: str(file),
            self._speeds[clip.role]: clip.words(),
            self._gallery: list(history),
            self._history: history,
        }

    def _file(self, name: str, suffix: str) -> Path:
        """Return a new file, in place of the oldest one."""
        file = self._folder / f"{name}_{uuid.uuid4().hex[:12]}.{suffix}"
        files = self._files.setdefault(suffix, deque())
        files.append(file)
        if len(files) > _KEPT:
            files.popleft().unlink(missing_ok=True)
        return file
