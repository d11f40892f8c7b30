"""Random weights in the shards of any mesh, against the full network in one process."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from scipy import stats
from torch import nn

from fsdp_cp import build_mesh
from fsdp_cp.measure.memory import LiveStorages
from fsdp_cp.sharding.initialise import initialise
from fsdp_cp.sharding.settings import ShardSettings
from models.families.ltx2 import LTX2
from models.families.wan import Wan
from models.roles.role_plan import plan_role
from tests.oracles.tiny_wan import ARCHITECTURE, tiny_role
from tests.tiers import long_case, slow, slow_case

WORLD = 4
MESHES = {"dp4": {}, "dp2 x cp2": {"cp": 2}, "replicas": {"dp_replicate": 2}}


def _full_network(seed=5):
    network = WanTransformer3DModel(**ARCHITECTURE)
    initialise(network, seed=seed, special=Wan().fill_special)
    return dict(network.named_parameters())


def _random_role(mesh, device="cpu", trainable=True, seed=5, **settings):
    plan = plan_role("student", checkpoint=None, architecture=ARCHITECTURE, sharding=ShardSettings(**settings))
    return tiny_role(plan, build_mesh(heads=4, **mesh), device=device, trainable=trainable, seed=seed)


def _random_weights(mesh, trainable, settings):
    rank = torch.distributed.get_rank()
    torch.manual_seed(100 + rank)  # ranks that are seeded differently must not mix rows of different networks
    before = torch.get_rng_state()
    role = _random_role(mesh, trainable=trainable, **settings)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state moved"
    weights = {name: w.full_tensor() for name, w in role.weights().items()}
    return weights if rank in (0, 3) else None


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("dp2 x cp2", {"activation_checkpointing": "full", "offload": "cpu"}),
        slow_case("replicas", {"strategy": "optim"}),
        long_case("dp4", {"precision": "bf16"}),
        long_case("dp4", {"strategy": "no_shard", "precision": "fp64"}),
    ],
)
def test_random_weights_are_the_same_on_every_mesh(pools, mesh, settings):
    truth = _full_network()
    trainable = settings.get("precision") != "bf16"
    first, _, _, last = pools[WORLD].run(_random_weights, MESHES[mesh], trainable, settings)
    for weights in (first, last):
        assert weights.keys() == truth.keys()
        for name, expected in truth.items():
            stored = weights[name].dtype
            assert torch.equal(weights[name], expected.detach().to(stored)), name
    stored = {w.dtype for w in first.values()}
    if not trainable:
        assert stored == {torch.bfloat16, torch.float32}, "a frozen network is stored as it computes"
    else:
        assert stored == {torch.float64 if settings.get("precision") == "fp64" else torch.float32}


def test_every_module_and_every_seed_has_a_stream_of_its_own():
    weights, others = _full_network(), _full_network(seed=6)
    drawn = [name for name, w in weights.items() if w.std() > 0 and not (w == 1).all()]
    assert len(drawn) > 30
    for i, name in enumerate(drawn):
        assert not torch.equal(weights[name], others[name]), name
        for other in drawn[i + 1 :]:
            if weights[name].shape == weights[other].shape:
                assert not torch.equal(weights[name], weights[other]), (name, other)


@slow
@pytest.mark.parametrize(
    ("family", "config"),
    [
        (Wan(), ARCHITECTURE | {"attention_head_dim": 24, "ffn_dim": 256, "text_dim": 64}),
        *((LTX2(), LTX2().examples()[version]) for version in ("2.0", "2.3", "2.5")),
    ],
    ids=["wan", "ltx2-2.0", "ltx2-2.3", "ltx2-2.5"],
)
def test_distributions_are_those_of_diffusers(family, config):
    """Constants are equal. Other parameters have the same distribution (Kolmogorov-Smirnov) and scale."""
    torch.manual_seed(0)
    truth = family.transformer(**config)
    with torch.device("meta"):
        ours = family.build(config, "architecture")
    ours.to_empty(device="cpu")
    initialise(ours, seed=1, special=family.fill_special)
    pairs = list(zip(truth.named_parameters(), ours.named_parameters(), strict=True))
    constants = 0
    for (name, expected), (same, found) in pairs:
        assert name == same
        expected, found = expected.detach().flatten(), found.detach().flatten()
        if expected.std() == 0:
            assert torch.equal(expected, found), name
            constants += 1
            continue
        # For 1e2 parameters a p-value of 1e-5 is very unlikely. Seeds are fixed, so the test is deterministic.
        assert stats.ks_2samp(expected.numpy(), found.numpy()).pvalue > 1e-5, name
        # Standard errors of the two deviations: at most 1 / sqrt(2 n) each for a normal, less for a uniform.
        assert found.std() / expected.std() == pytest.approx(1, abs=6 / found.numel() ** 0.5), name
    assert constants > 5 and len(pairs) - constants > 20
    if isinstance(family, Wan):
        tables = [p.detach() for n, p in ours.named_parameters() if n.endswith("scale_shift_table")]
        assert torch.cat([t.flatten() for t in tables]).std() == pytest.approx((4 * 24) ** -0.5, rel=0.1)


class _Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table = nn.Parameter(torch.zeros(4, 3))


def test_uninitialized_parameters_are_refused_by_name():
    with torch.device("meta"):
        on_meta = nn.Sequential(nn.Linear(2, 2))
    inner = nn.ModuleDict({"inner": _Table()})
    for model, name in ((inner, r"inner\.table"), (on_meta, r"0\.weight")):
        with pytest.raises(ValueError, match=name):
            initialise(model, seed=0)


def test_the_family_has_the_last_word():
    def special(module, name, tensor):
        if name == "table":
            tensor.fill_(7.0)
        if isinstance(module, nn.Linear) and name == "bias":
            tensor.zero_()

    model = _Table()
    children = dict(model.named_children())
    initialise(model, seed=0, special=special)
    assert (model.table == 7).all() and (model.linear.bias == 0).all() and model.linear.weight.std() > 0
    assert dict(model.named_children()) == children, "the model itself must not lose its children"
    assert model.table.requires_grad


def _peak_of_building():
    with LiveStorages() as live:
        role = _random_role({})
        built = live.bytes
    modules = {}
    for name, w in role.weights().items():
        modules[name.rpartition(".")[0]] = modules.get(name.rpartition(".")[0], 0) + 4 * w.numel()
    buffers = sum(b.untyped_storage().nbytes() for b in role.network.buffers())
    shards = sum(p.to_local().untyped_storage().nbytes() for p in role.parameters())
    return live.peak_bytes, built, shards, buffers, max(modules.values()), sum(modules.values())


@slow
def test_no_rank_holds_more_than_its_shards_and_one_module(pools):
    for peak, built, shards, buffers, module, whole in pools[WORLD].run(_peak_of_building):
        assert shards < 0.4 * whole, "a test with large shards would show nothing"
        # Rotary tables are made in float64, several at a time.
        assert peak <= shards + module + 12 * buffers, (peak, built, shards, module, buffers)
