"""Encoded sets as data of a run: plan and dry run, order, damage, and mistakes."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch

from distill.config import compose_config
from distill.data.order import Batching, clips_of_micro_batches
from distill.data.sets.encode import Encoding
from distill.data.sets.encoded_set import EncodedSet
from distill.data.sets.files import read_header
from distill.data.sets.write_set import SetWriter, refuse_other_set, verify
from distill.data.settings import EncodedSettings, MovingShapesSettings
from distill.encode import main
from distill.planning.command import planned_shapes
from distill.planning.encoders import encoder_peaks
from distill.run.folder import held_run_dir
from distill.run.open import dry_run
from distill.run.setup import plan_run
from tests.encoded import encode_source, open_set
from tests.oracles.state_set import SHAPE, stored, write_state_set
from tests.unit.refused import change, check_command, refused
from tests.unit.test_paths import as_a_user

CLIPS = 40
TIMES = [1.0, 0.9, 0.75, 0.5]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A set of 40 shards, of one clip each."""
    folder = tmp_path_factory.mktemp("sets") / "set"
    write_state_set(folder, CLIPS, TIMES, per_shard=1)
    return folder


def composed(path, *words):
    return compose_config(["experiment=quickstart", "data=encoded", f"data.path={path}", "device=cpu", *words])


@pytest.mark.parametrize("method", ["dmd2", "rcm", "ode_regression"])
def test_the_plan_and_the_dry_run_of_a_set(path, tmp_path, caplog, method):
    config = composed(path, f"experiment=quickstart_{method}", "dry_run=true", f"run_dir={tmp_path}/run")
    assert config.data.has_clips
    plan = plan_run(config)
    assert planned_shapes(config) == ({"video": SHAPE}, {"text": (4, 32)}) == config.data.sample_shapes()
    assert encoder_peaks(config, planned_shapes(config)) == {}
    caplog.set_level(logging.INFO)
    dry_run(config, plan)
    assert f"{CLIPS} clips" in caplog.text and not (tmp_path / "run").exists()


def test_a_gan_needs_clips_and_a_set_has_them(path):
    composed(path, "method.gan_weight_student=0.01")


def numbers(data, *, world, steps, first=0):
    """Return the clips of each step that the ranks of a mesh read, as the positions of their latents."""
    known = {stored(n, TIMES)["latents"].sum().item(): n for n in range(CLIPS)}
    found = [[] for _ in range(steps)]
    for rank in range(world):
        batching = Batching(global_size=8, micro_batch_size=2, dp_rank=rank, dp_size=world)
        how = {"seed": 1, "buckets": [range(len(data))], "first_sample": first, "steps": steps}
        for i, (_, batch) in enumerate(clips_of_micro_batches(**how, batching=batching)):
            found[i // batching.accumulation] += [known[data[k]["latents"].sum().item()] for k in batch]
    return [sorted(step) for step in found]


def test_the_order_is_that_of_every_mesh_and_of_a_resumed_run(path, tmp_path):
    data = open_set(path, cache=tmp_path)
    alone = numbers(data, world=1, steps=10)
    assert numbers(data, world=4, steps=10) == alone
    for epoch in (alone[:5], alone[5:]):
        assert sorted(n for step in epoch for n in step) == list(range(CLIPS))
    assert numbers(data, world=2, steps=7, first=24) == alone[3:]


def test_damaged_shards_are_refused_or_skipped(tmp_path):
    """A shard that is shorter shows at opening; another byte at reading, or after a verification."""
    damaged = tmp_path / "set"
    write_state_set(damaged, CLIPS, TIMES, per_shard=1)
    whole = open_set(damaged, cache=tmp_path)
    short, changed = (damaged / f"clips-{n:08d}.safetensors" for n in (3, 7))
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    short.write_bytes(short.read_bytes()[:-1])
    with refused(short.name):
        open_set(damaged, cache=tmp_path)
    skipping = open_set(damaged, cache=tmp_path, damaged="skip")
    assert len(skipping) == CLIPS - 1 and skipping.fingerprint != whole.fingerprint
    with refused(changed.name):
        [skipping.with_states(TIMES)[i] for i in range(len(skipping))]
    assert verify(damaged, "SET") == {"clips": [3, 7], "texts": []}
    skipping = open_set(damaged, cache=tmp_path, damaged="skip")
    assert [skipping.caption(i) for i in (3, 6)] == [whole.caption(n) for n in (4, 8)]
    assert len(skipping) == CLIPS - 2 == len([skipping[i] for i in range(CLIPS - 2)])
    assert [*skipping.captions()] == sorted({skipping.caption(i) for i in range(CLIPS - 2)}, key=whole.captions().index)
    assert EncodedSet(damaged, "SET").first_row(whole.caption(3), among=[4, 8]) is None
    change(damaged / "damaged.json", index="of another set")
    assert len(EncodedSet(damaged, "SET").damaged()["clips"]) == 1, "the size that shows by itself"


def test_an_index_that_changes(path, tmp_path):
    """The index is read and checked at its first use; a file that shrinks is refused, and one that is replaced goes
    on."""
    copy = shutil.copytree(path, tmp_path / "set")
    index = copy / "index.safetensors"
    content, place = bytearray(index.read_bytes()), read_header(index)[0]["row.clip"]
    opened = EncodedSet(copy, "SET")
    index.write_bytes(b"")
    for use in (opened.clip_of, opened.caption):
        with refused(index.name):
            use(1)
    index.write_bytes(content)
    opened = EncodedSet(copy, "SET")
    index.unlink()
    assert opened.caption(1) == EncodedSet(path, "SET").caption(1) and opened.clip_of(1) == 1
    for at in (place.offset, -1):  # of a number, of a caption
        damaged = content.copy()
        damaged[at] ^= 1
        index.write_bytes(damaged)
        opened = EncodedSet(copy, "SET")
        for use in (opened.clip_of, opened.caption):
            with refused(index.name):
                use(1)
        with refused(index.name):
            verify(copy, "SET")


def test_mistakes_with_a_set(path, tiny, tmp_path):
    with refused("data.height"):
        composed(path, "data.height=32")
    with refused("data.encoders"):  # another family's
        EncodedSettings(path=str(path), encoders=str(tiny)).sample_shapes()
    (tmp_path / "captions.txt").write_text("one two three four five six seven\nx\n")
    data = encode_source(tmp_path / "captions.txt", tiny, max_text_tokens=4)
    left_out = (data.set.path / "left_out.csv").read_text()
    assert "one two three" in left_out and "data.max_text_tokens=4" in left_out
    with refused("data=encoded"):  # captions alone
        composed(data.set.path, "experiment=quickstart_rcm")
    with refused(""):  # 16 latent channels
        plan_run(composed(data.set.path, "method.gan_weight_student=0", "sample.report_clips=0"))


@pytest.mark.parametrize("name", ["unfinished/mine", "left_out.csv", "clips/a.mp4", "x.tmp", "encoding.json"])
def test_files_with_a_sets_names_stay_where_no_set_was_begun(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("{}")
    with refused("OUT"), SetWriter(tmp_path, "OUT=set", {}).begun():
        pass
    assert file.read_text() == "{}" and not (tmp_path / ".lock").exists()


def test_a_whole_set_that_cannot_be_written_is_read(path):
    path.chmod(0o555)
    as_a_user(refuse_other_set, path, "OUT=set")
    path.chmod(0o755)


def test_one_process_at_a_time_writes_a_set(tmp_path):
    with held_run_dir(tmp_path / "set", "OUT"), refused("OUT"), SetWriter(tmp_path / "set", "OUT=set", {}).begun():
        pass


def test_a_set_is_known_by_its_settings(path, tmp_path):
    settings: Encoding = EncodedSettings(path=str(path)).encoding()
    assert settings == replace(MovingShapesSettings().encoding(), encoders=settings.encoders)
    about = json.loads((path / "set.json").read_text())["settings"]
    with refused("negative_prompt"), SetWriter(path, "OUT=set", about | {"negative_prompt": "ugly"}).begun():
        pass
    nested = {"teacher": {"weights": "0" * 200, "seed": 1}}
    with SetWriter(tmp_path / "begun", "OUT=set", nested).begun():
        pass
    other = {"teacher": nested["teacher"] | {"seed": 2}}
    with refused("teacher.seed"), SetWriter(tmp_path / "begun", "OUT=set", other).begun():
        pass
    with SetWriter(path, "OUT=set", about).begun() as is_whole:
        assert is_whole
    assert torch.equal(open_set(path, cache=tmp_path)[5]["latents"], stored(5, TIMES)["latents"])


@pytest.mark.parametrize(
    ("source", "options", "name"),
    [("nowhere", [], "SOURCE="), (".", [], "SOURCE="), ("captions.txt", ["--num-frames", "10"], "--num-frames=10")],
)
def test_the_command_names_its_own_arguments(source, options, name, tiny, tmp_path, capsys):
    (tmp_path / "captions.txt").write_text("x\n")
    places = tmp_path / source, tmp_path / "set", "--encoders", tiny, "--device", "cpu"
    check_command(main, capsys, name, *places, *options)
    assert not (tmp_path / "set").exists()
