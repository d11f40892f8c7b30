"""Settings of sparse roles, their plans and files; what is refused."""

import json

import pytest

from distill.config.schema import OptimizerSettings
from fsdp_cp.errors import UserError
from models import verify
from models.causal import CausalSettings
from models.families.registry import family_of
from models.families.wan import Wan
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


@pytest.mark.parametrize("family", ["ltx", "ltx2", "hunyuan15"])
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


def test_operations():
    """Operations are those of chosen tiles, of attention between tiles, and of gates; a dense layer has as before."""
    shapes, condition = {"video": (4, 4, 16, 16)}, {"text": (5, 10)}
    family, tokens, tiles = Wan(), 4 * 8 * 8, 64
    for dense_layers in ([], [1]):
        plan = _plan(sparse=SparseSettings(sparsity=0.75, tile=[1, 2, 2], dense_layers=dense_layers))
        dense = family.flops(plan.config, shapes, condition)
        ours = plan.sparse.flops(family, plan.config, shapes, condition, 0.75)
        width, layers = family.width(plan.config), 2 - len(dense_layers)
        saved = 4 * layers * width * (tokens**2 - tokens**2 // 4 - tiles**2)
        assert ours.forward == dense.forward - saved + 2 * layers * tokens * width**2
        assert ours.sparse == 4 * layers * width * (tokens**2 // 4 + tiles**2)


def test_a_checkpoint_with_gates(tmp_path):
    """It says its own settings; without them, a dense role of it is refused, and a gate of another width too."""
    verify.write_example(tmp_path / "net", "wan", Wan().examples()["t2v"], SPARSE)
    plan = plan_role("student", checkpoint=str(tmp_path / "net"))
    assert plan.sparse is not None and plan.sparse.settings == SPARSE
    other = tmp_path / "other" / "base"  # the first folder says: adapters, before their base
    other.mkdir(parents=True)
    (other / FILE).write_text('{"sparsity": 0.5}')
    folders = [tmp_path / "net", other]
    assert plan_sparse("student", SparseSettings(), folders, Wan(), plan.config).settings == SPARSE
    (tmp_path / "net" / FILE).unlink()
    with refused("student.sparse_attention.sparsity"):
        plan_role("student", checkpoint=str(tmp_path / "net"))
    assert plan_role("student", checkpoint=str(tmp_path / "net"), sparse=SPARSE).sparse is not None
    wider = Wan().examples()["t2v"] | {"num_attention_heads": 2}
    (tmp_path / "net" / "config.json").write_text(json.dumps({"_class_name": Wan.class_name, **wider}))
    with refused("student.checkpoint"):
        plan_role("student", checkpoint=str(tmp_path / "net"), sparse=SPARSE)
    (tmp_path / "net" / FILE).write_text('{"sparsity": null}')
    with pytest.raises(UserError, match=FILE):
        plan_role("student", checkpoint=str(tmp_path / "net"))


def test_gates_are_in_the_group_of_additions():
    shapes = _plan(sparse=SPARSE).own_shapes
    settings = OptimizerSettings(lr=1e-5, additions_lr=1e-4, lr_scale={"*.to_gate_compress.bias": 0.5})
    groups = settings.groups([*shapes, "additions.heads.video.weight"], "optim.student")
    scales = {name: group.lr_scale for group, names in groups.items() for name in names}
    assert scales["blocks.0.to_gate_compress.weight"] == scales["additions.heads.video.weight"] == pytest.approx(10)
    assert scales["blocks.1.to_gate_compress.bias"] == pytest.approx(5)
    assert scales["blocks.0.attn1.to_q.weight"] == 1
