"""Model, method, data and cluster groups: the resolved values of their combinations."""

from dataclasses import asdict, replace
from functools import lru_cache, reduce
from pathlib import Path

import pytest
import yaml

from distill.config import compose_config
from distill.config.errors import CONFIGS
from distill.config.schema import EmaSettings, OptimSettings
from distill.methods import METHODS
from fsdp_cp.errors import UserError

NODES = {1: ([], 8), 4: (["cluster=h20x8x4", "batch_size=32"], 32)}
"""The words and the global batch, by the number of nodes."""
PAIRS = {
    ("1_3b", "dmd2"): (4, 7200, 2e-6), ("14b", "dmd2"): (8, 7200, 2e-6), ("1_3b", "rcm"): (4, 7000, 2e-6),
    ("14b", "rcm"): (8, 12000, 1e-6), ("1_3b", "meanflow"): (4, 10000, 1e-5),
}  # fmt: skip
"""Context-parallel ranks, steps and the student's learning rate, by network and method."""
PLACES = [("480p", 1), ("720p", 4), ("720p", 1), ("480p", 4), ("720p", 4)]
COMBINATIONS = [(pair, *place) for pair, place in zip(PAIRS, PLACES, strict=True)]
STARTS = ("wan2_1_t2v_1_3b_dmd2", "wan2_1_t2v_14b_rcm", "wan2_1_t2v_1_3b_meanflow")


@lru_cache
def composed(*words):
    return compose_config(list(words))


def named(combination):
    (network, method), resolution, nodes = combination
    data = [f"data=video_folder_{resolution}"] if resolution != "480p" else []
    return [f"experiment=wan2_1_t2v_{network}_{method}", *data, *NODES[nodes][0]]


def identify(combination):
    (network, method), resolution, nodes = combination
    return f"{network}-{method}-{resolution}-{nodes}"


@pytest.mark.parametrize("combination", COMBINATIONS, ids=identify)
def test_groups_alone_compose_the_same_from_another_experiment(combination):
    """Settings of the experiment named first must not remain."""
    (network, method), resolution, nodes = combination
    others = [name for name in STARTS if name != f"wan2_1_t2v_{network}_{method}"]
    start = others[COMBINATIONS.index(combination) % len(others)]
    groups = [f"model=wan2_1_t2v_{network}", f"method={method}", f"data=video_folder_{resolution}", *NODES[nodes][0]]
    config = composed(f"experiment={start}", *groups)
    wanted = composed(*named(combination))
    assert replace(config, run_dir=None) == replace(wanted, run_dir=None)
    assert (config.data.num_frames, config.data.height) == (81, {"480p": 480, "720p": 720}[resolution])
    assert (config.mesh.cp, config.steps, config.optim.student.lr) == PAIRS[network, method]
    assert config.batch_size == NODES[nodes][1] and config.method.name == method
    assert config.teacher.shard_ranks == (8 if nodes == 4 else None), "the frozen teacher within a node"


def test_adapters_on_four_nodes_have_one_base_that_is_sharded_in_one_way():
    config = composed("experiment=wan2_1_t2v_14b_dmd2", *NODES[4][0], "adapters=lora")
    assert [getattr(config, role).shard_ranks for role in ("teacher", "student", "fake")] == [8, 8, 8]


# ---------------------------------------------------------------- what a word brings


@pytest.mark.parametrize("method", ["dmd2", "ode_regression", "rcm"])
def test_a_method_brings_its_rates(method):
    words = ["experiment=wan2_1_t2v_1_3b_dmd2", f"method={method}"]
    words += ["method.trajectories=/paths"] if method == "ode_regression" else []
    assert composed(*words).optim == composed(*words, f"optim={method}").optim
    assert (composed(*words).optim == composed("experiment=wan2_1_t2v_1_3b_dmd2").optim) == (method == "dmd2")


def test_optim_has_the_last_word_over_the_method():
    words = ["experiment=wan2_1_t2v_14b_dmd2", "method=rcm"]
    other = composed(*words, "optim=meanflow").optim
    assert (other.student.lr, other.student.betas, other.clip) == (1e-5, [0.9, 0.99], None), "not rCM's"
    assert composed(*words, "optim=scm").optim.student.lr == 1e-6, "which has one for 14B"
    assert composed(*words, "optim=scm", "optim.student.lr=3e-6").optim.student.lr == 3e-6
    assert composed("experiment=quickstart_rcm").optim.student.schedule == "cosine", "the recipe's own optim="


# ---------------------------------------------------------------- the source of each number

RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
WAN = sorted(path.stem for path in (CONFIGS / "model").glob("wan*.yaml"))


def recipe(model, method):
    """Compose a pair, from the experiment of another method."""
    start = "wan2_1_t2v_1_3b_rcm" if method == "dmd2" else "wan2_1_t2v_1_3b_dmd2"
    words = ["method.trajectories=/paths"] if method == "ode_regression" else []
    return composed(f"experiment={start}", f"model={model}", f"method={method}", *words)


def changed(config):
    """Return the settings of a pair that are not the schema's defaults, by key."""
    roles = METHODS[config.method.name][0].trained_roles
    optim, optim_defaults = asdict(config.optim), asdict(OptimSettings())
    groups = {f"optim.{role}": (optim[role], optim_defaults[role]) for role in roles}
    groups |= {"optim": ({"clip": config.optim.clip}, optim_defaults)}
    groups |= {"method": (asdict(config.method), asdict(type(config.method)()))}
    if config.student.ema.enabled:
        groups |= {"student.ema": (asdict(config.student.ema), asdict(EmaSettings()))}
    found = {f"{group}.{key}" for group, (ours, base) in groups.items() for key in ours if ours[key] != base[key]}
    return found - {"method.trajectories"}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_pair_has_the_numbers_of_its_one_source(method):
    kind, settings = METHODS[method]
    for model in WAN:
        name = f"{model} {method}"
        if name not in RECIPES:
            with pytest.raises(UserError, match=method):
                kind.check_experts(settings(), {"teacher": (0.9,), "student": (0.9,)}, "both")
            continue
        entry = RECIPES[RECIPES[name].get("as", name)]
        assert entry["source"] and not entry["published"].keys() & entry["ours"].keys()
        numbers = entry["published"] | entry["ours"]
        config = recipe(model, method)
        assert {key: reduce(getattr, key.split("."), config) for key in numbers} == numbers, name
        assert changed(config) <= numbers.keys() and "steps" in numbers, f"{name}: numbers without a source"


def test_the_table_has_no_other_pairs():
    pairs = {f"{model} {method}" for model in WAN for method in METHODS}
    assert RECIPES.keys() <= pairs and all(f"wan2_1_t2v_1_3b {method}" in RECIPES for method in METHODS)


def test_models_of_other_families_have_the_numbers_of_wan_1_3b():
    found, wanted = recipe("ltx_video_13b", "rcm"), recipe("wan2_1_t2v_1_3b", "rcm")
    assert found.teacher.family == "ltx"
    for key in ("method", "optim", "steps"):
        assert getattr(found, key) == getattr(wanted, key)
    assert found.student.ema == wanted.student.ema


def test_a_quickstart_with_the_network_of_a_recipe_is_refused():
    """It would train 14B at the rates of a network of half a million parameters."""
    with pytest.raises(UserError, match="^model=wan2_1_t2v_14b"):
        compose_config(["model=wan2_1_t2v_14b"])
