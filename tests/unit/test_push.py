"""``python -m models.export --push``: what a repository on the hub holds after it, and what it never loses."""

import json

import huggingface_hub.utils._http as http
import pytest

from fsdp_cp.files.atomic_folder import MANIFEST, atomic_folder
from models.card import Base, Card, write_card
from models.export import main
from models.families.wan import Wan
from models.push import push
from tests.hub import repository_of, serve
from tests.unit.refused import refused

CONFIG, WEIGHTS, CARD = "config.json", [f"diffusion_pytorch_model-{i}.safetensors" for i in (1, 2, 3)], "README.md"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)  # between retries
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    state = serve(monkeypatch, tmp_path / "cache")
    yield state
    state.close()


def export(folder, mark="", weights=WEIGHTS):
    """Write an export, in the place of an earlier one."""
    with atomic_folder(folder, {"run": "/home/me/runs/wan", "step": 2}) as unfinished:
        for name in (CONFIG, *weights):
            (unfinished / name).write_text(f'"{name} {mark}"')
        write_card(unfinished, f"# card {mark}\n")
    return folder


def files_of(hub, name="owner/new"):
    repo = hub.repos[name]
    return repo.commits[repo.branches["main"]]


def test_a_new_repository_and_the_same_command_again(hub, tmp_path):
    out, options = export(tmp_path / "out"), {"private": True, "replace": False}
    push(out, "owner/new", **options)
    found, repo = files_of(hub), hub.repos["owner/new"]
    assert found.keys() == {".gitattributes", CONFIG, *WEIGHTS, CARD, MANIFEST} and repo.private
    assert all(found[name] == (out / name).read_bytes() for name in (CONFIG, *WEIGHTS, CARD))
    assert b"/home/me" not in found[MANIFEST] and json.loads(found[MANIFEST])["about"] == {"run": "wan", "step": 2}
    commits = len(repo.commits)
    export(out)  # times of files differ
    push(out, "owner/new", **options)
    assert (len(repo.commits), hub.uploads) == (commits, 3)


@pytest.mark.parametrize("folder", ["", "/transformer", "/transformer_full"])
def test_a_card_on_the_hub_has_no_path_of_this_machine(folder):
    """Adapters of another network than the pipeline's have it in their code."""
    base, data = (
        Base.of(f"/home/me/Wan-1.3B{folder}", None),
        {"encoders": "/home/me/Wan-1.3B", "path": "/home/me/clips"},
    )
    settings = {"data": data, "method": {"name": "flow_matching", "built_in_guidance": 5.0 if folder else 1.0}}
    facts = {"config": {}, "about": {"role": "student"}, "settings": settings, "few_steps": None, "base": base}
    text = Card(family=Wan(), repository="owner/new", adapters={"rank": 4}, **facts).text()
    assert ("guidance_scale=1.0" in text) == bool(folder), "guidance is not added to one that is built in"
    assert '"Wan-1.3B"' in text and "/home" not in text
    assert ('"Wan-1.3B", subfolder="transformer_full"' in text) == ("full" in folder) == ("transformer=" in text)


def test_a_folder_of_another_directory_is_no_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Base.of("ckpt/wan", None).repository is None
    (tmp_path / "ckpt" / "wan").mkdir(parents=True)
    assert Base.of("ckpt/wan", None).argument == json.dumps(str(tmp_path / "ckpt" / "wan")), "cards run in their folder"
    commit = "0123456789" * 4
    assert Base.of(f"owner/wan@{commit}", None).argument == f'"owner/wan", revision="{commit}"'


def test_a_broken_connection_leaves_the_repository_as_it_was(hub, tmp_path):
    out, hub.breaks_after = export(tmp_path / "out"), 1
    with refused("--push"):
        push(out, "owner/new", private=False, replace=False)
    assert files_of(hub).keys() == {".gitattributes"} and len(hub.large) == 1
    hub.breaks_after = None
    push(out, "owner/new", private=False, replace=False)
    assert hub.uploads == 3, "one was there already"
    assert files_of(hub).keys() > {CONFIG, *WEIGHTS, CARD}


def test_replacing_is_asked_for_and_keeps_what_others_wrote(hub, tmp_path, monkeypatch):
    push(export(tmp_path / "out"), "owner/new", private=False, replace=False)
    files_of(hub)["picture.png"] = b"theirs"
    export(tmp_path / "out", "second", WEIGHTS[:1])
    before = dict(files_of(hub))
    with refused("--yes"):
        push(tmp_path / "out", "owner/new", private=False, replace=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    with refused("owner/new"):
        push(tmp_path / "out", "owner/new", private=False, replace=False)
    assert files_of(hub) == before
    push(tmp_path / "out", "owner/new", private=False, replace=True)
    assert files_of(hub).keys() == before.keys() - {*WEIGHTS[1:]}, "no weights of the earlier export are left"
    assert b"second" in files_of(hub)[CARD]
    files_of(hub)[CARD] += b"edited"
    export(tmp_path / "out", "third", WEIGHTS[:1])
    push(tmp_path / "out", "owner/new", private=False, replace=True)
    assert files_of(hub)[CARD].endswith(b"edited") and b"third" in files_of(hub)[CONFIG]


@pytest.mark.parametrize(
    ("name", "raced", "private"),
    [("other/new", False, False), ("other/old", False, False), ("owner/old", True, False), ("owner/old", False, True)],
    ids=["may not create", "may not write", "somebody else commits", "public"],
)
def test_refusals_change_nothing(hub, tmp_path, name, raced, private):
    hub.is_raced = raced
    for old in ("other/old", "owner/old"):
        hub.repos[old] = repository_of({"notes.txt": b"theirs"})
    with refused(name):
        push(export(tmp_path / "out"), name, private=private, replace=True)
    assert all("notes.txt" in repo.commits["1" * 40] and len(repo.commits) <= 2 for repo in hub.repos.values())


@pytest.mark.parametrize("words", [["--push", "name"], ["--push", "a/b@c"], ["--yes"], ["--private"]], ids=str)
def test_mistakes_are_refused_before_the_export(tmp_path, words):
    assert main([str(tmp_path), str(tmp_path / "out"), *words]) == 2 and not (tmp_path / "out").exists()
