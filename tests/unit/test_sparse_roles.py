"""Settings of sparse roles, their plans and files; what is refused."""

import json
from functools import partial

import pytest

from distill.config.schema import OptimizerSettings
from fsdp_cp.errors import UserError
from models import verify
from models.causal import CausalSettings
from models.families.operations import count_flops
from models.families.registry import family_of
from models.roles.gates import plan_sparse
from models.roles.role_plan import plan_role
from models.sparse import FILE, SparseSettings
from tests.oracles.tiny_wan import ARCHITECTURE
from tests.unit.refused import refused

SPARSE = SparseSettings(sparsity=0.9, tile=[1, 2, 2])


def _plan(**options):
    return plan_role("student", checkpoint=None, architecture=dict(ARCHITECTURE), **options)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"sparsity": 1.0}, "sparsity"),
        ({"sparsity": 0.5, "tile": [4, 0, 4]}, "tile"),
        ({"sparsity": 0.5, "tile": [4, 4]}, "tile"),
        ({"sparsity": 0.5, "warmup": [0.6, 10]}, "warmup"),
        ({"sparsity": 0.5, "warmup": [0.1, 0]}, "warmup"),
        ({"sparsity": 0.5, "warmup": [0.1]}, "warmup"),
    ],
)
def test_bad_settings(values, name):
    with refused(name):
        SparseSettings(**values)


@pytest.mark.parametrize(
    "options",
    [
        {"sparse": SPARSE, "causal": CausalSettings(chunk=1)},
        {"sparse": SparseSettings(tile=[2, 2, 2])},
        {"sparse": SparseSettings(sparsity=0.5, dense_layers=[2])},
    ],
)
def test_settings_that_do_not_fit_a_role(options):
    with refused("student.sparse_attention"):
        _plan(**options)


@pytest.mark.parametrize("family", ["ltx", "hunyuan15"])
def test_families_without_sparse_attention(family):
    architecture = next(iter(family_of(family, "student").examples().values()))
    with refused("student.sparse_attention.sparsity"):
        plan_role("student", checkpoint=None, architecture=architecture, family=family, sparse=SPARSE)


def test_a_ramp():
    settings = SparseSettings(sparsity=0.9, warmup=[0.25, 30])
    expected = {0: 0.0, 29: 0.0, 30: 0.25, 60: 0.5, 119: 0.75, 120: 0.9, 10**6: 0.9, None: 0.9}
    assert {updates: settings.sparsity_after(updates) for updates in expected} == expected


def test_a_tile_of_the_whole_video_is_named(caplog):
    plan = _plan(sparse=SparseSettings(sparsity=0.9, tile=[4, 8, 8]))
    plan.tokens({"video": (4, 3, 8, 8)}, {"text": (5, 10)})
    assert "dense" in caplog.text


@pytest.mark.parametrize(
    ("family", "example", "frame"),
    [("wan", "t2v", {}), ("ltx2", "2.3", {}), ("ltx2", "2.0", {"first_frame": (4, 1, 8, 8)})],
)
def test_operations(family, example, frame):
    """Operations are those of chosen tiles, of attention between tiles, and of gates; a dense layer has as before. A
    given frame of LTX-2 is dense."""
    family = family_of(family, "student")
    tokens, given, tiles = 4 * 8 * 8, 64 * len(frame), 64
    for dense_layers in ([], [1]):
        plan = plan_role(
            "student", checkpoint=None, architecture=family.examples()[example], family=family.name,
            sparse=SparseSettings(sparsity=0.75, tile=[1, 2, 2], dense_layers=dense_layers),
        )  # fmt: skip
        shapes, condition = verify.sample_shapes(plan, (4, 8, 8))
        condition |= frame
        dense = count_flops(family, plan.config, shapes, condition)
        ours = plan.sparse.flops(family, plan.config, shapes, condition, 0.75)
        width, layers = family.width(plan.config), 2 - len(dense_layers)
        pairs = tokens**2 - (tokens - given) ** 2 * 3 // 4 + tiles**2
        saved = 4 * layers * width * (tokens**2 - pairs)
        assert ours.forward == dense.forward - saved + 2 * layers * tokens * width**2
        assert ours.sparse == 4 * layers * width * pairs


@pytest.mark.parametrize(("name", "example"), [("wan", "t2v"), ("ltx2", "2.3")])
def test_a_checkpoint_with_gates(tmp_path, name, example):
    """It says its own settings; without them, a dense role of it is refused, and a gate of another width too."""
    family = family_of(name, "student")
    config, from_checkpoint = family.examples()[example], partial(plan_role, "student", family=name)
    verify.write_example(tmp_path / "net", name, config, SPARSE)
    plan = from_checkpoint(checkpoint=str(tmp_path / "net"))
    assert plan.sparse is not None and plan.sparse.settings == SPARSE
    other = tmp_path / "other" / "base"  # the first folder says: adapters, before their base
    other.mkdir(parents=True)
    (other / FILE).write_text('{"sparsity": 0.5}')
    folders = [tmp_path / "net", other]
    assert plan_sparse("student", SparseSettings(), folders, family, plan.config).settings == SPARSE
    (tmp_path / "net" / FILE).unlink()
    with refused("student.sparse_attention.sparsity"):
        from_checkpoint(checkpoint=str(tmp_path / "net"))
    assert from_checkpoint(checkpoint=str(tmp_path / "net"), sparse=SPARSE).sparse is not None
    wider = config | {"num_attention_heads": 2}
    (tmp_path / "net" / "config.json").write_text(json.dumps({"_class_name": family.class_name, **wider}))
    with refused("student.checkpoint"):
        from_checkpoint(checkpoint=str(tmp_path / "net"), sparse=SPARSE)
    (tmp_path / "net" / FILE).write_text('{"sparsity": null}')
    with pytest.raises(UserError, match=FILE):
        from_checkpoint(checkpoint=str(tmp_path / "net"))


def test_gates_are_in_the_group_of_additions():
    shapes = _plan(sparse=SPARSE).own_shapes
    settings = OptimizerSettings(lr=1e-5, additions_lr=1e-4, lr_scale={"*.to_gate_compress.bias": 0.5})
    groups = settings.groups([*shapes, "additions.heads.video.weight"], "optim.student")
    scales = {name: group.lr_scale for group, names in groups.items() for name in names}
    assert scales["blocks.0.to_gate_compress.weight"] == scales["additions.heads.video.weight"] == pytest.approx(10)
    assert scales["blocks.1.to_gate_compress.bias"] == pytest.approx(5)
    assert scales["blocks.0.attn1.to_q.weight"] == 1
