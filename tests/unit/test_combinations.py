"""Model, method, data and cluster groups: the resolved values of their combinations."""

import re
from dataclasses import replace
from functools import lru_cache, reduce

import pytest
import yaml

from distill.config import compose_config
from distill.config.errors import CONFIGS
from distill.methods import METHODS
from tests.tiers import slow, slow_case
from tests.unit.refused import refused

NODES = {1: ([], 8), 4: (["cluster=h20x8x4", "batch_size=32"], 32)}
"""Words and global batch, by the number of nodes."""
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


@pytest.mark.parametrize("combination", [COMBINATIONS[0], *(slow_case(c) for c in COMBINATIONS[1:])], ids=identify)
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


@slow
def test_adapters_on_four_nodes_have_one_base_that_is_sharded_in_one_way():
    config = composed("experiment=wan2_1_t2v_14b_dmd2", *NODES[4][0], "adapters=lora")
    assert [getattr(config, role).shard_ranks for role in ("teacher", "student", "fake")] == [8, 8, 8]


# ---------------------------------------------------------------- what a word brings


def test_typed_settings_win_over_the_recipe_and_a_typed_recipe_over_the_pair():
    words = ["experiment=wan2_1_t2v_14b_dmd2", "method=rcm"]
    assert composed(*words).optim.student.lr == 1e-6
    assert composed(*words, "optim.student.lr=3e-6").optim.student.lr == 3e-6
    small = composed(*words, "recipe=wan2_1_t2v_1_3b_rcm")
    assert (small.optim.student.lr, small.mesh.cp) == (2e-6, 8), "1.3B's numbers on 14B's mesh"
    assert small.optim == composed("experiment=wan2_1_t2v_1_3b_rcm").optim


def test_the_numbers_of_a_method_need_no_experiment():
    config = composed("method=rcm")
    assert replace(config, mesh=None, run_dir=None) == replace(
        composed("experiment=quickstart_rcm"), mesh=None, run_dir=None
    )


# ---------------------------------------------------------------- the source of each number

MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml") if not path.stem.startswith("quickstart"))
PAIR_FILES = {path.stem: path for path in (CONFIGS / "recipe").glob("*.yaml")}


@slow
@pytest.mark.parametrize("model", MODELS)
def test_a_pair_has_a_file_with_its_source_or_is_refused_with_the_files_that_exist(model):
    for method in sorted(METHODS):
        words = ["experiment=wan2_1_t2v_1_3b_dmd2", f"model={model}", f"method={method}"]
        if f"{model}_{method}" not in PAIR_FILES:
            with refused(f"recipe=wan2_1_t2v_1_3b_{method}"):
                compose_config(words)
            continue
        config = composed(*words)
        assert config.steps and config.batch_size and config.optim.student.lr


EXPERIMENT_OF = {
    recipe: file.stem
    for file in sorted((PAIR_FILES["quickstart_dmd2"].parents[1] / "experiment").glob("*.yaml"))
    for recipe in re.findall(r"override /recipe: (\S+)", file.read_text())
}
"""Experiments that choose a recipe by its name, by recipe."""


def numbers(path):
    """Return the settings of a recipe file and of the files it includes within its model, by dotted key."""
    loaded = yaml.safe_load(path.read_text())
    flat = {}

    def add(node, prefix):
        for key, value in node.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}.")
            else:
                flat[f"{prefix}{key}"] = value

    for name in loaded.pop("defaults", []):
        if name != "_self_" and not name.startswith("shared/"):
            flat |= numbers(PAIR_FILES[name])
    add(loaded, "")
    return flat


@slow
@pytest.mark.parametrize("name", sorted(name for name in PAIR_FILES if not name.startswith("quickstart")))
def test_a_recipe_leaves_no_number_of_a_published_pair_to_the_schema(name):
    """Each rate, guidance, step list and average of the composed run is in the recipe's own file."""
    chosen = EXPERIMENT_OF.get(name)
    if chosen is None:
        model, method = next((name[: -len(m) - 1], m) for m in METHODS if name.endswith(f"_{m}"))
        config = composed("experiment=wan2_1_t2v_1_3b_dmd2", f"model={model}", f"method={method}")
    else:
        config = composed(f"experiment={chosen}")
    written = numbers(PAIR_FILES[name])
    assert "steps" in written and "optim.student.lr" in written and "optim.clip" in written
    assert {key: reduce(getattr, key.split("."), config) for key in written} == written, "nothing else sets them"
    source = r"\w+/[\w-]+ [0-9a-f]{7}|config_sft|arXiv:\d|these are LTX-2.3's, untried"
    assert re.search(source, PAIR_FILES[name].read_text()), "a source at a commit"


def test_segments_that_grow_are_refused_with_registered_buffers():
    words = ("experiment=wan2_1_t2v_1_3b_dmd2", "student.communication_buffers=process_group")
    with refused("student.communication_buffers"):
        compose_config([*words])
    compose_config([*words, "cuda_allocator=null"])
    assert composed(words[0]).cuda_allocator == "expandable_segments:True"
