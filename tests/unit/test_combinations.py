"""Model, method, data and cluster groups: the resolved values of their combinations."""

from dataclasses import replace
from functools import lru_cache

import pytest

from distill.config import compose_config

NODES = {1: ([], 8), 4: (["cluster=h20x8x4", "batch_size=32"], 32)}
"""The words and the global batch, by the number of nodes."""
PAIRS = {
    ("1_3b", "dmd2"): (4, 7200, 2e-6), ("14b", "dmd2"): (8, 12000, 1e-6), ("1_3b", "rcm"): (4, 7000, 2e-6),
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
    other = composed(*words, "optim=dcm").optim
    assert (other.student.lr, other.student.betas, other.clip) == (1e-5, [0.9, 0.999], 10.0), "not the 14B's rate"
    assert composed(*words, "optim=scm").optim.student.lr == 1e-6, "which has one for 14B"
    assert composed(*words, "optim=scm", "optim.student.lr=3e-6").optim.student.lr == 3e-6
    assert composed("experiment=quickstart_rcm").optim.student.schedule == "cosine", "the recipe's own optim="
