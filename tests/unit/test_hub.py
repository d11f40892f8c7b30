"""Names on the hub: a server on this machine answers as the hub does; what it holds comes into a cache."""

import errno
import json
import os
from unittest import mock

import huggingface_hub
import pytest
import torch.distributed as dist
from huggingface_hub import constants

from models.files.hub import encoder_files, network_files, resolve
from models.files.shipped import find_shipped, parse_hub_name
from tests.hub import FIRST, repository_of, serve
from tests.pools import Pools
from tests.unit.refused import refusal

SECOND = "2" * 40
SHARDS = [f"transformer/diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
NEEDED = {"README.md", "model_index.json", "transformer/config.json", "transformer/m.safetensors.index.json", *SHARDS}


def repository(mark):
    index = {"weight_map": {name: name.removeprefix("transformer/") for name in SHARDS}}
    others = ("vae/config.json", "vae/v.safetensors", "text_encoder/t.bin", "transformer/code.py")
    texts = {name: f"{name} {mark}" for name in (*NEEDED, *others)}
    texts["transformer/m.safetensors.index.json"] = json.dumps(index | {"mark": mark})
    return {name: text.encode() for name, text in texts.items()}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve a repository with two commits, of which ``main`` is the first; the cache is empty."""
    state = serve(monkeypatch, tmp_path / "cache")
    state.repos["owner/net"] = repo = repository_of(repository("first"))
    repo.commits[SECOND] = repository("second")
    state.branches, state.commits = repo.branches, repo.commits
    yield state
    state.close()


def take(name="owner/net", wanted=network_files, **options):
    (value,) = resolve({"teacher.checkpoint": (name, wanted)}, **options).values()
    folder = find_shipped(value)
    return value, {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_the_needed_files_come_and_only_once(hub):
    assert take() == (f"owner/net@{FIRST}", NEEDED)
    assert sorted(hub.sent) == sorted(NEEDED)
    assert take()[1] == take(f"owner/net@{FIRST}")[1] == NEEDED and len(hub.sent) == len(NEEDED)
    assert take(wanted=encoder_files)[1] == NEEDED | {"vae/config.json", "vae/v.safetensors"}, "no code, no pickle"


def test_paths_are_no_names(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "net").mkdir(parents=True)
    assert resolve({"a": ("owner/net", network_files), "b": (None, network_files), "c": ("/x/y", network_files)}) == {}
    for text in ("assets/quickstart_teacher", "a/b/c", "net", "/a/b", "../b", "a/..", "", "a/b@", "~/b", "a b/c"):
        assert parse_hub_name(text) is None, text
    assert parse_hub_name("Wan-AI/Wan2.1-T2V-1.3B-Diffusers@refs/pr/1").revision == "refs/pr/1"


def test_a_branch_that_moves(hub, caplog):
    value, _ = take()
    hub.branches["main"] = SECOND
    assert take(recorded={"teacher.checkpoint": value})[0] == value
    assert SECOND in caplog.text, "a run says that the branch moved, and continues with its commit"
    assert take(recorded={"teacher.checkpoint": f"other/net@{FIRST}"})[0] == f"owner/net@{SECOND}"
    assert take(f"owner/net@{FIRST}", recorded={"teacher.checkpoint": f"owner/net@{SECOND}"})[0] == value


def test_a_cache_without_a_network(hub, monkeypatch):
    value, _ = take()
    hub.branches["main"] = SECOND
    hub.close()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert take()[0] == take(value)[0] == value
        assert "owner/other" in refusal(take, "owner/other")
        assert SECOND in refusal(take, f"owner/net@{SECOND}")
    shard = find_shipped(value) / SHARDS[1]
    shard.unlink()
    assert shard.name in refusal(take), "a shard that the index names"


def test_a_download_that_breaks_is_continued(hub):
    hub.broken = SHARDS[1]
    refusal(take)
    came = len(hub.sent)
    hub.broken = ""
    assert take()[1] == NEEDED and len(hub.sent) - came < len(NEEDED)


@pytest.mark.parametrize(
    ("name", "said"), [("owner/missing", "folder"), ("owner/gated", "hf auth login"), ("owner/net@later", "later")]
)
def test_what_the_hub_refuses_is_one_line(hub, name, said):
    assert said in refusal(take, name)


def test_no_space_left_and_no_download_wanted(hub):
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(huggingface_hub, "snapshot_download", side_effect=full):
        assert "HF_HOME" in refusal(take)
    assert FIRST in refusal(take, download=False) and not hub.sent
    take()
    assert take(download=False)[1] == NEEDED


def _on_ranks(endpoint, template, caches):
    """Resolve on every rank, each with its cache: two ranks of one node, and two nodes of one rank each."""
    rank = dist.get_rank()
    settings = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": caches[rank]}
    place = {"NO_PROXY": "127.0.0.1", "LOCAL_RANK": str(int(rank == 1))}
    with mock.patch.multiple(constants, **settings, HF_HUB_OFFLINE=False), mock.patch.dict(os.environ, place):
        return take()


@pytest.mark.slow
def test_nodes_take_one_commit_into_their_caches(hub, tmp_path):
    """Two nodes share a cache at once, another has its own. Each file comes once into each cache."""
    caches = [str(tmp_path / name) for name in ("shared", "shared", "shared", "own")]
    with Pools(timeout=120) as pools:
        found = pools[4].run(_on_ranks, constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_TEMPLATE, caches)
    assert found == [(f"owner/net@{FIRST}", NEEDED)] * 4
    assert sorted(hub.sent) == sorted([*NEEDED, *NEEDED])
