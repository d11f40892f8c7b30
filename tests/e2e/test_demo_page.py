"""The page of ``python -m distill.demo`` in a browser: Chromium, driven by Playwright."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlparse

import av
import pytest

from tests.e2e.launch import ROOT, environment
from tests.tiny_pipeline import build_tiny_pipeline
from tests.unit.test_sample_command import TEACHER, write_causal_run, write_run

pytest.importorskip("gradio", reason="needs gradio: pip install -e '.[demo]'")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs the browser chromium")]

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--autoplay-policy=no-user-gesture-required",
)  # fmt: skip
EVIL = """<script>window.hacked=1</script> "quoted" 'too' <img src=x onerror="window.hacked=1"> & **bold**"""
MINUTES = 300_000  # milliseconds: a busy machine starts slowly
FRAME_LOG = """() => {
    window.shown = [];
    new MutationObserver(() => {
        const image = document.querySelector('#live_student img');
        if (image && window.shown.at(-1)?.[0] !== image.src) window.shown.push([image.src, performance.now()]);
    }).observe(document.body, {subtree: true, childList: true, attributes: true});
    document.querySelector('#sample').addEventListener('click', () => {
        const image = document.querySelector('#live_student img');
        [window.pressed, window.shown] = [performance.now(), image ? [[image.src, 0]] : []];
    }, true);
}"""


@contextmanager
def served(run, *words, ranks=0):
    """Serve ``run``; yield the address and the process."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, *torchrun, "-m", "distill.demo", str(run), "--port", port, *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment() | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        line = next((line for line in process.stdout if line.startswith("the page is at")), None)
        assert line is not None, "the server ended"
        yield line.split()[4].rstrip(";"), process
    finally:
        process.terminate()
        process.communicate(timeout=120)
    assert not [*Path(os.environ.get("TMPDIR", "/tmp")).glob("fsdp_cp_demo_*/student_*")], "files are removed"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@contextmanager
def opened(browser, address, *, silent=True):
    """Open a tab; require that it asks no other host, and that its console stays empty."""
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    hosts, console = set(), []
    page.on("request", lambda request: hosts.add(urlparse(request.url).netloc))
    page.on("console", lambda message: console.append(message.text))
    page.on("pageerror", lambda error: console.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#sample", timeout=MINUTES)
    yield page
    assert hosts <= {urlparse(address).netloc, ""}, hosts  # blob: and data: have none
    assert not silent or console == [], console
    page.close()


def text(page, name):
    return page.input_value(f"#{name} textarea, #{name} input")


def sample(page, **values):
    for name, value in values.items():
        page.fill(f"#{name} textarea, #{name} input", str(value))
    page.click("#sample")


def wait_for(page, words, name="status"):
    page.wait_for_function(
        "([name, words]) => new RegExp(words).test(document.querySelector(`#${name} textarea`).value)",
        arg=[name, words],
        timeout=MINUTES,
    )
    return text(page, name)


def download(page, name, folder):
    with page.expect_download() as waiting:
        page.click(f"#{name} a[download], #{name} button[aria-label='Download'], #{name} button[title='Download']")
    waiting.value.save_as(folder / f"{name}.mp4")
    return folder / f"{name}.mp4"


def tracks(file):
    with av.open(str(file)) as video:
        return {stream.type for stream in video.streams}, sum(1 for _ in video.decode(video=0))


def test_two_tabs_a_teacher_and_a_lost_rank(browser, tmp_path):
    run = write_run(tmp_path / "run", TEACHER)
    with served(run, "--teacher", "--cp", "2", ranks=2) as (address, process):
        with opened(browser, address, silent=False) as first, opened(browser, address, silent=False) as second:
            sample(first, caption=EVIL)
            assert "<script>" in wait_for(first, "Error")
            sample(first, caption="a red circle growing", steps_teacher=400)
            wait_for(first, "steps", "speed_student")
            sample(second, caption="a blue square blinking", steps_teacher=2)
            wait_for(second, "Waiting for 1 clip of other tabs")
            wait_for(first, "Done")
            wait_for(second, "Done")
            assert "400 steps, 6 frames" in text(first, "speed_teacher")
            assert tracks(download(first, "video_student", tmp_path)) == ({"video"}, 6)
            assert tracks(download(first, "video_teacher", tmp_path)) == ({"video"}, 6)
            assert first.evaluate("window.hacked") is None
            first.screenshot(path=tmp_path / "teacher.png")
            sample(first, steps_teacher=5000)
            wait_for(first, "steps", "speed_student")
            others = subprocess.run(["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True)
            os.kill(int(others.stdout.split()[1]), signal.SIGKILL)
            for page in (first, second):
                assert "rank" in wait_for(page, "The end")
        assert process.wait(60) not in (0, 2)


def test_sound(browser, tmp_path):
    run = write_run(tmp_path / "run", TEACHER.with_name("quickstart_sound_teacher"), experiment="quickstart_sound")
    with served(run) as (address, _), opened(browser, address) as page:
        sample(page)
        wait_for(page, "Done")
        assert tracks(download(page, "video_student", tmp_path)) == ({"video", "audio"}, 6)
        page.screenshot(path=tmp_path / "sound.png")


def test_a_causal_student_streams_until_it_is_stopped(browser, tmp_path):
    with served(write_causal_run(tmp_path)) as (address, _), opened(browser, address) as page:
        page.evaluate(FRAME_LOG)
        for _ in range(2):  # the second time, nothing is warmed up
            sample(page, frames=18, steps_student=8)
            wait_for(page, "Reading|Sampling")
            wait_for(page, "Done")
        shown = [entry for entry in page.evaluate("window.shown") if entry[1]]
        pressed = page.evaluate("window.pressed")
        assert len(shown) >= 5, "of 9 chunks; a page that is busy may leave some out"
        seconds = (shown[-1][1] - shown[0][1]) / 1000
        rate = 2 * (len(shown) - 1) / seconds
        print(f"first picture {shown[0][1] - pressed:.0f} ms after the click, {rate:.3g} frames per second")
        print(text(page, "speed_student"))
        assert "18 frames" in text(page, "speed_student")
        page.screenshot(path=tmp_path / "causal.png")
        sample(page, frames=5000)
        wait_for(page, "steps, ([2-9]|[1-9][0-9])[0-9] frames:", "speed_student")
        page.click("#stop")
        wait_for(page, "Stopped")
        kinds, frames = tracks(download(page, "video_student", tmp_path))
        assert kinds == {"video"} and 20 <= frames < 5000
        sample(page, frames=7)
        assert "7" in wait_for(page, "Error")


def test_any_caption_of_a_text_encoder(browser, tmp_path):
    tiny = build_tiny_pipeline(tmp_path / "tiny", seed=1)
    (tmp_path / "captions.txt").write_text("a red square\na green square\n")
    run = write_run(
        tmp_path / "run", tiny / "transformer", "data=captions", "sample.report_clips=0", "data.num_frames=5",
        "data.height=32", "data.width=48", "data.max_text_tokens=24", f"data.path={tmp_path / 'captions.txt'}",
        f"data.encoders={tiny}", f"teacher.checkpoint={tiny}",
    )  # fmt: skip
    with served(run) as (address, _), opened(browser, address) as page:
        sample(page, caption=EVIL)
        wait_for(page, "Done")
        page.click("#history button.thumbnail-item, #history .thumbnail-item")
        time.sleep(1)
        assert page.evaluate("window.hacked") is None and page.query_selector("img[src=x]") is None
        assert EVIL in page.inner_text("#history")
        page.screenshot(path=tmp_path / "history.png")
    assert [*run.glob("cache/*")] and len([*run.glob("cache/*")]) == 1, "the user's text is not among the run's files"
