"""Settings that a resume refuses, logs or ignores, and the files that identify a run."""

import copy
import json
import re
import shutil
from dataclasses import asdict, fields, is_dataclass, replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distill.config import Config
from distill.config.schema import SETTINGS
from distill.data.settings import DATA
from distill.methods import METHODS
from distill.run.checkpoint_checks import BY_CONTENT, check_resume, find_sources
from fsdp_cp.errors import UserError
from models.causal import CausalSettings
from models.lora.saved import find_adapters
from models.lora.settings import LoraSettings
from models.roles.role_plan import plan_role
from tests.oracles.tiny_wan import ARCHITECTURE
from tests.tiny_pipeline import render_clips
from tests.unit.refused import refused

OF_A_START = {"run_dir", "dry_run", "plan", "world"}


def _documented() -> set[str]:
    """Return the settings in the first column of the table in docs/running.md."""
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    rows = text.partition("| refused |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w.]+\.\w+|seed)`", row.split("|")[1])}


MAPPINGS = {key for key, settings in SETTINGS.items() if settings[0].is_mapping}


def _leaves(settings, prefix=""):
    for item in fields(settings):
        if is_dataclass(value := getattr(settings, item.name)):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


def _other(value, is_mapping):
    if is_mapping:
        return {"a": "b"} if value is None else {"a": "c"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, "x"] if isinstance(value, list) else f"{value}x"


def _changed(config, key):
    config, (group, _, name) = copy.deepcopy(config), key.rpartition(".")
    owner = attrgetter(group)(config) if group else config
    setattr(owner, name, _other(getattr(owner, name), key in MAPPINGS))
    return config


def _sources(fingerprint="1", other=()):
    return {key: {"value": None, "fingerprint": f"{fingerprint}{key in other}"} for key in BY_CONTENT}


def _checkpoint(folder, config, **state):
    folder.mkdir(parents=True, exist_ok=True)
    known = {"step": 3, "samples": 0, "seed": config.seed, "method": config.method.name, "data": "", "seconds": 0.0}
    known |= {"settings": asdict(config), "sources": _sources()}
    known |= {"configs": {}, "updates": {}, "skipped": {}, "unlogged": {}}
    (folder / "state.json").write_text(json.dumps(known | state))
    return folder


def _config(method="dmd2", data="moving_shapes", mappings=False):
    config = Config(steps=5, batch_size=2, method=METHODS[method][1](name=method), data=DATA[data]())
    for key in MAPPINGS & {*_leaves(config)} if mappings else ():
        config = _changed(config, key)
    return config


def test_every_setting_is_refused_as_documented_or_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    outcomes: dict[str, set[str]] = {}
    configs = [_config(), *(_config(method=name) for name in METHODS), *(_config(data=name) for name in DATA)]
    configs.append(_config(data="video_folder", mappings=True))
    for i, config in enumerate(configs):
        checkpoint = _checkpoint(tmp_path / str(i) / "step_00000003", config)
        for key in _leaves(config):
            if i and key not in MAPPINGS and not key.startswith(("method.", "data.")):
                continue
            caplog.clear()
            sources = _sources(other=[key])
            try:
                found = check_resume(_changed(config, key), checkpoint, (), sources)
                outcome = "logged" if f"resumed with {key}=" in caplog.text else "ignored"
                assert found == sources
            except UserError as error:
                outcome = "refused"
                assert key.removesuffix(".name") in str(error)
            outcomes.setdefault(key, set()).add(outcome)
    assert outcomes.keys() == {key for key, settings in SETTINGS.items() if not settings[0].group} - {"method", "data"}
    assert {key for key, found in outcomes.items() if "refused" in found} == _documented()
    assert {key for key, found in outcomes.items() if "ignored" in found} == OF_A_START


OF_TRAINING = ("optim.student.lr", "precision", "student.sparse_attention.sparsity", "fake.ema.decay", "student.fp8")


@pytest.mark.parametrize("key", OF_TRAINING)
def test_a_finished_run_keeps_its_settings_of_training(tmp_path, key):
    config = _config()
    checkpoint = _checkpoint(tmp_path / "step_00000005", config, step=config.steps)
    check_resume(config, checkpoint, (), _sources())
    with refused(key):
        check_resume(_changed(config, key), checkpoint, (), _sources())


def test_a_difference_is_accepted_by_name_and_recorded(tmp_path):
    config = _config()
    checkpoint = _checkpoint(tmp_path / "step_00000003", config)
    now = _changed(config, "teacher.checkpoint")
    sources = _sources(other=["teacher.checkpoint"])
    now.checkpoint.accept = ["data.path"]
    with pytest.raises(UserError, match=r"teacher\.checkpoint"):
        check_resume(now, checkpoint, (), sources)
    now.checkpoint.accept = ["teacher.checkpoint"]
    found = check_resume(now, checkpoint, (), sources)["teacher.checkpoint"]
    assert found["earlier"] == _sources()["teacher.checkpoint"] and found["since_step"] == 3
    again = _checkpoint(tmp_path / "again" / "step_00000003", now, sources=sources | {"teacher.checkpoint": found})
    now.checkpoint.accept = []
    assert check_resume(now, again, (), sources) == sources, "the next start needs no acceptance"
    # The same contents in another place, and a checkpoint without fingerprints.
    assert check_resume(now, checkpoint, (), _sources()) == _sources()
    old = _checkpoint(tmp_path / "old" / "step_00000003", config, sources={})
    assert check_resume(now, old, (), sources) == sources


def test_a_checkpoint_s_settings_are_compared_by_their_present_names(tmp_path):
    config, shares = _config(), [0.125] * 8
    settings = asdict(config)
    del settings["data"]["color_shares"]
    settings["data"]["colour_shares"] = shares
    checkpoint = _checkpoint(tmp_path / "step_00000003", config, settings=settings)
    with refused("data.color_shares"):
        check_resume(config, checkpoint, (), _sources())
    config.data = replace(config.data, color_shares=shares)
    check_resume(config, checkpoint, (), _sources())


def test_a_mapping_is_one_setting_to_accept():
    config = _config(data="video_folder", mappings=True)
    config.checkpoint.accept = ["data.columns"]
    config.data = replace(config.data, path="clips")
    with refused("data.columns="):  # the next check: the table
        find_sources(config, ())


def test_what_cannot_be_accepted_is_refused_at_the_start():
    for name in ("seed", "data.nothing", "teacher"):
        config = _config()
        config.checkpoint.accept = [name]
        with pytest.raises(UserError, match=r"checkpoint\.accept"):
            find_sources(config, ())


@pytest.mark.parametrize("causal", [None, CausalSettings(chunk=3), CausalSettings(chunk=2, window=1)], ids=str)
def test_another_mask_is_refused(tmp_path, causal):
    def planned(causal):
        return plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE), causal=causal)

    config, role = _config(), planned(CausalSettings(chunk=2))
    saved = {"student": asdict(role.causal) | {"frames": 6}}
    checkpoint = _checkpoint(
        tmp_path / "step_00000003", config, configs={"student": role.config}, updates={"student": 3}, causal=saved
    )
    check_resume(config, checkpoint, [role], _sources())
    with refused("student.causal"):
        check_resume(config, checkpoint, [planned(causal)], _sources())


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: None, set()),
        (lambda d: _flip(d / "pipe/transformer/diffusion_pytorch_model.safetensors"), {"teacher.checkpoint"}),
        (lambda d: _flip(d / "lora/pytorch_lora_weights.safetensors"), {"student.checkpoint"}),
        (lambda d: _flip(d / "training/pytorch_lora_weights.safetensors"), {"student.training_adapter"}),
        (lambda d: _flip(d / "pipe/vae/diffusion_pytorch_model.safetensors"), {"data.encoders"}),
        (lambda d: _flip(d / "pipe/text_encoder/model.safetensors"), {"data.encoders"}),
        (lambda d: (d / "clips/clip_0.mp4").open("ab").write(b"x"), {"data.path"}),
        (lambda d: (d / "clips/metadata.csv").open("a").write("clip_1.mp4,again\n"), {"data.path"}),
    ],
    ids=["moved", "teacher", "adapters", "training", "vae", "text", "clip", "table"],
)
def test_files_are_known_by_their_contents(folders, tmp_path, change, expected):
    before = _files(folders)
    shutil.copytree(folders, tmp_path / "copy")
    change(tmp_path / "copy")
    now = _files(tmp_path / "copy")
    differing = {
        key for key in BY_CONTENT if (before[key] or {}).get("fingerprint") != (now[key] or {}).get("fingerprint")
    }
    assert differing == expected
    assert {key for key in BY_CONTENT if before[key] is None} == {"fake.checkpoint"}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("folders")
    shutil.copytree(tiny, folder / "pipe")
    render_clips(folder / "clips", 2)
    (folder / "lora").mkdir()
    layer = "transformer.blocks.0.attn1.to_q.lora_"
    save_file(
        {f"{layer}A.weight": torch.ones(2, 96), f"{layer}B.weight": torch.ones(96, 2)},
        folder / "lora/pytorch_lora_weights.safetensors",
    )
    shutil.copytree(folder / "lora", folder / "training")
    return folder


def _files(folder):
    config = _config(data="video_folder")
    config.data = replace(config.data, path=str(folder / "clips"), encoders=str(folder / "pipe"))
    config.teacher.checkpoint, config.student.checkpoint = str(folder / "pipe"), str(folder / "lora")
    saved = find_adapters(config.student.checkpoint)
    files = {"saved": saved, "training_adapter": find_adapters(str(folder / "training"))}
    student = plan_role("student", checkpoint=config.teacher.checkpoint, lora=LoraSettings(), **files)
    return find_sources(config, [student])


def test_files_that_a_checkpoint_does_not_know_are_named(tmp_path, caplog):
    config = _config()
    check_resume(config, _checkpoint(tmp_path / "step_00000003", config, sources={}), (), _sources())
    assert all(key in caplog.text for key in BY_CONTENT)
    adapter, settings = "student.training_adapter", asdict(config)
    del settings["student"]["training_adapter"]  # the checkpoint's version knew none, so its steps had none
    known = {key: used for key, used in _sources().items() if key != adapter}
    older = _checkpoint(tmp_path / "older" / "step_00000003", config, settings=settings, sources=known)
    check_resume(config, older, (), {**_sources(), adapter: None})
    with refused(adapter):
        check_resume(_changed(config, adapter), older, (), _sources())
