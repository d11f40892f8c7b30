"""Every command that README, docs, docstrings, Makefile and Dockerfile name runs, at test size, from another folder.

``RULES`` of :mod:`tests.e2e.documented_rules` says how. A command that the documents have and no rule matches fails
:func:`test_every_command_has_a_rule`; so does a rule that matches nothing any more.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys

import pytest

from tests.e2e.documented import Found, find_commands, of_markdown, taken_apart
from tests.e2e.documented_places import SMALL, Places, make_places, start
from tests.e2e.documented_rules import RULES, expect_dry, rule_of, syntax
from tests.e2e.launch import ROOT, environment

COMMANDS = find_commands()


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Places:
    return make_places(tmp_path_factory.mktemp("documented"))


def test_every_command_has_a_rule():
    without = [f"{item.where}: {item.command}" for item in COMMANDS if rule_of(item.command) is None]
    assert not without, "documented, but not run by any rule of documented_rules.py:\n" + "\n".join(without)
    used = {id(rule_of(item.command)) for item in COMMANDS}
    assert not [rule.pattern for rule in RULES if id(rule) not in used], "rules that match nothing that is documented"
    assert all(rule.why for rule in RULES if rule.how is syntax)


def test_commands_are_found_wherever_they_stand():
    text = """
Start `python -m a.b --c` or `make me`, not `train.py` or `python`.

| command | what |
|---|---|
| `torchrun ... train.py x=1` | it |

    torchrun --nproc-per-node 2 train.py \\
        y=2          # a note

```
.venv/bin/torchrun train.py z=1   # a note
a tree/    python -m in a listing is none
```

```bash
A=1 cp here there
```

```python
make = "me"
```
"""
    assert sorted(of_markdown(text)) == sorted([
        "python -m a.b --c", "make me", "torchrun ... train.py x=1", "torchrun --nproc-per-node 2 train.py y=2",
        "torchrun train.py z=1", "cp here there",
    ])  # fmt: skip
    with pytest.raises(AssertionError, match="are these commands"):
        of_markdown("```fish\nls\n```\n")


def test_settings_in_quotes_compose():
    """``'key=value'`` of README and docs, as the shell hands them on."""
    from distill.config import compose_config

    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    quoted = {code for text in texts for code in re.findall(r"`('[a-z_.]+=[^`]*'|\"[a-z_.]+=[^`]*\")`", text)}
    assert len(quoted) > 4
    for code in sorted(code for code in quoted if "..." not in code):
        (word,) = shlex.split(code)
        config = compose_config(["data=video_folder", "data.path=a", "data.encoders=b", word])  # takes any caption
        key = word.partition("=")[0].split(".")
        assert getattr(getattr(config, key[0]), key[1]) if len(key) == 2 else getattr(config, key[0])


def wishes() -> dict[str, str]:
    """What README's table says to add to the command above it, by what one gets."""
    table = (ROOT / "README.md").read_text().split("| to have | add |\n|---|---|\n")[1].split("\n\n")[0]
    return dict(re.fullmatch(r"\| (.*) \| `(.*)` \|", row).groups() for row in table.splitlines())


@pytest.mark.parametrize("wish", wishes())
def test_what_the_readme_says_to_add_for_a_wish_is_planned(wish, places, capsys):
    from train import main

    added = wishes()[wish]
    (line,) = {c for c in of_markdown((ROOT / "README.md").read_text()) if "experiment=wan2_1_t2v_1_3b_dmd2" in c}
    world = {"cluster=h20x8x4": 32, "cluster=one_gpu": 1, "cluster=h20x4": 4, "cluster=h200": 1}.get(
        added.split()[0], 8
    )
    mine = places.root / "ckpt" / "mine"
    mine.exists() or mine.symlink_to(places.root / "ckpt" / "Wan2.1-T2V-1.3B-Diffusers")
    words = [*taken_apart(line).words, *added.split(), f"world={world}", "dry_run=true"]
    words += [] if "run_dir" in added else [f"run_dir={places.elsewhere}/wish"]
    code = main([*map(places.put, words)])
    expect_dry(code, capsys.readouterr().err)


def test_the_readme_has_a_line_for_each_common_wish():
    added = " ".join(wishes().values())
    for word in (
        "model=wan2_1_t2v_14b",
        "720p",
        "method=rcm",
        "cluster=h20x8x4",
        "data.path=",
        "student.checkpoint=",
        "one_gpu",
    ):
        assert word in added


def _cases(slow: bool) -> list[Found]:
    return [item for item in COMMANDS if (rule := rule_of(item.command)) is not None and rule.slow is slow]


def _quick() -> list:
    """A few of the quick ones at once: a dry run of each of them takes seconds."""
    items = _cases(slow=False)
    return [pytest.param(item, marks=() if i % 5 == 0 else pytest.mark.slow) for i, item in enumerate(items)]


def _name(item: Found) -> str:
    return re.sub(r"\W+", "_", item.command)[:90]


@pytest.mark.parametrize("item", _quick(), ids=_name)
def test_command(item, places, capsys, monkeypatch):
    monkeypatch.chdir(places.elsewhere)
    rule_of(item.command).how(item.command, places, capsys)
    assert not (places.elsewhere / "runs").exists(), "a dry run writes nothing"


def _in_small() -> list:
    """With the slow tests; with the long ones benchmarks, and runs of methods, which differ in their method alone."""
    long = re.compile(r"-m benchmarks\.|quickstart_(teacher|scm|meanflow|dcm)\b")
    marks = {True: pytest.mark.long, False: pytest.mark.slow}
    return [pytest.param(item, marks=marks[bool(long.search(item.command))]) for item in _cases(slow=True)]


@pytest.mark.parametrize("item", _in_small(), ids=_name)
def test_command_in_small(item, places, capsys, monkeypatch):
    monkeypatch.chdir(places.elsewhere)
    rule_of(item.command).how(item.command, places, capsys)


@pytest.mark.slow
def test_two_nodes_meet_as_documented(places):
    """Two torchruns on this machine as two nodes, with the options of the SLURM script and of docs/methods/rcm.md."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    run_dir = places.elsewhere / "two_nodes"
    words = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "17",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", str(ROOT / "train.py"),
        *SMALL, f"run_dir={run_dir}",
    ]  # fmt: skip
    options = {"cwd": places.elsewhere, "env": environment(), "text": True}
    nodes = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) for _ in range(2)]
    printed = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(printed)
    start_of_run = json.loads((run_dir / "starts.jsonl").read_text())
    assert start_of_run["world_size"] == 2 and "--nnodes 2" in start_of_run["command"]


@pytest.mark.slow
def test_the_python_blocks_of_run_md(places, monkeypatch):
    """Those of "The student in diffusers" as they stand, but for the clip's size, beside a run in ``runs/NAME``."""
    text = (ROOT / "docs" / "run.md").read_text()
    section = text.split("## The student in diffusers")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    code = "\n".join(blocks).replace("height=480, width=832, num_frames=81", "height=32, width=48, num_frames=17")
    code = re.sub(r"torch\.randn\(\s*1, 16, 21, 60, 104\s*\)", "torch.randn(1, 16, 5, 4, 6)", code)
    code = re.sub(r"^(pipeline\(PROMPT.*)$", r"clips.append(\1)", code, flags=re.M)
    assert len(blocks) == 2 and code.count("clips.append") == 2 and "480" not in code and "104" not in code
    found = [item.command for item in COMMANDS if "data=video_folder data.path=CLIPS" in item.command]
    folder = places.elsewhere / "with_pipeline"
    published = "method.step_list=[1.0,0.9375,0.8333,0.625]"
    size = ["data.height=32", "data.width=48"]
    start(found[0], places, *SMALL, *size, published, f"run_dir={folder / 'runs' / 'NAME'}")
    monkeypatch.chdir(folder)
    names = {"BASE": str(places.root / "pipeline"), "PROMPT": "a red square", "clips": []}
    exec(compile(code, "docs/run.md", "exec"), names)
    assert [clip.frames[0].shape for clip in names["clips"]] == [(17, 32, 48, 3)] * 2
