"""What model, method, data and cluster compose to: the resolved values of each combination, whichever words it is."""

from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product

import pytest

from distill.config import compose_config
from distill.config.errors import CONFIGS
from fsdp_cp.errors import UserError

SIZES = {"480p": (81, 480, 832, 16.0), "720p": (81, 720, 1280, 16.0)}
NODES = {1: ([], 8), 4: (["cluster=h20x8x4", "batch_size=32"], 32)}
"""By the number of nodes: the words, and the global batch."""
SHARED = {
    "mesh.dp_replicate": 1, "mesh.dp_shard": -1, "mesh.ulysses": "auto", "mesh.ring": "auto", "micro_batch_size": 1,
    "precision": "bf16", "cuda_allocator": None, "student.activation_checkpointing": "full",
    "fake.activation_checkpointing": "full", "teacher.activation_checkpointing": "none", "student.ema.enabled": True,
    "teacher.checkpoint": None, "student.checkpoint": None, "checkpoint.every": 600, "sample.every": 600,
    "sample.prompts": 4, "sample.student_steps": [4], "sample.report_clips": 0, "optim.student.schedule": "constant",
    "optim.student.additions_lr": None, "optim.student.weight_decay": 0.01, "method.shift": 5.0,
}  # fmt: skip
DMD2 = SHARED | {
    "optim.student.betas": [0.0, 0.999], "optim.fake.betas": [0.0, 0.999], "optim.fake.additions_lr": 1e-5,
    "optim.student.warmup": 0, "optim.fake.warmup": 0, "optim.clip": 10.0, "method.guidance_scale": 5.0,
    "method.step_list": [1.0, 0.9375, 0.8333, 0.625], "student.ema.decay": 0.99, "student.ema.start": 40,
}  # fmt: skip
RCM = SHARED | {
    "optim.student.betas": [0.0, 0.999], "optim.fake.betas": [0.0, 0.999], "optim.fake.additions_lr": 1e-5,
    "optim.student.warmup": 100, "optim.fake.warmup": 100, "optim.clip": None, "method.guidance_scale": 5.0,
    "method.mid_times": [1.5, 1.4, 1.0], "method.tangent": "rcm", "method.time_std": 1.6, "student.ema.decay": None,
    "student.ema.gamma": 6.94, "student.ema.start": 0,
}  # fmt: skip
MEANFLOW = SHARED | {
    "optim.student.betas": [0.9, 0.99], "optim.student.warmup": 0, "optim.clip": None, "optim.student.lr": 1e-5,
    "optim.student.weight_decay": 0.0, "method.guidance_scale": 3.0, "student.ema.decay": None,
    "student.ema.gamma": 96.99, "student.ema.start": 0, "mesh.cp": 4, "steps": 10000, "log.every": 10,
}  # fmt: skip
VALUES = {
    ("1_3b", "dmd2"): DMD2 | {
        "mesh.cp": 4, "steps": 7200, "log.every": 6, "optim.student.lr": 2e-6, "optim.fake.lr": 4e-7,
        "method.fake_updates_per_student_update": 5,
    },
    ("14b", "dmd2"): DMD2 | {
        "mesh.cp": 8, "steps": 12000, "log.every": 10, "optim.student.lr": 1e-6, "optim.fake.lr": 1e-7,
        "method.fake_updates_per_student_update": 9,
    },
    ("1_3b", "rcm"): RCM | {
        "mesh.cp": 4, "steps": 7000, "log.every": 5, "optim.student.lr": 2e-6, "optim.fake.lr": 4e-7,
        "method.time_mean": 0.7, "method.sigma_max": 80.0, "method.tangent_warmup": 1000,
        "method.consistency_steps": 1000, "method.student_every": 5,
    },
    ("14b", "rcm"): RCM | {
        "mesh.cp": 8, "steps": 12000, "log.every": 10, "optim.student.lr": 1e-6, "optim.fake.lr": 1e-7,
        "method.time_mean": 1.5, "method.sigma_max": 200.0, "method.tangent_warmup": 0,
        "method.consistency_steps": 0, "method.student_every": 10,
    },
    ("1_3b", "meanflow"): MEANFLOW,
}  # fmt: skip
COMBINATIONS = list(product(VALUES, SIZES, NODES))
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
def test_the_values_of_a_combination(combination):
    pair, resolution, nodes = combination
    config = composed(*named(combination))
    settings = asdict(config)
    for key, value in VALUES[pair].items():
        found = settings
        for part in key.split("."):
            found = found[part]
        assert found == value, f"{key} is {found}"
    data = config.data
    assert (data.num_frames, data.height, data.width, data.fps) == SIZES[resolution]
    assert config.batch_size == NODES[nodes][1] and config.method.name == pair[1]
    sharded = [getattr(config, role).shard_ranks for role in ("teacher", "student", "fake")]
    assert sharded == [8 if nodes == 4 else None, None, None], "the frozen teacher within a node"


@pytest.mark.parametrize("combination", COMBINATIONS, ids=identify)
def test_groups_alone_compose_the_same_from_another_experiment(combination):
    """Nothing of the experiment that it began as may be left."""
    (network, method), resolution, nodes = combination
    others = [name for name in STARTS if name != f"wan2_1_t2v_{network}_{method}"]
    start = others[COMBINATIONS.index(combination) % len(others)]
    groups = [f"model=wan2_1_t2v_{network}", f"method={method}", f"data=video_folder_{resolution}", *NODES[nodes][0]]
    config = composed(f"experiment={start}", *groups)
    wanted = composed(*named(combination))
    assert replace(config, run_dir=None) == replace(wanted, run_dir=None)


def test_adapters_on_four_nodes_have_one_base_that_is_sharded_in_one_way():
    config = composed("experiment=wan2_1_t2v_14b_dmd2", *NODES[4][0], "adapters=lora")
    assert [getattr(config, role).shard_ranks for role in ("teacher", "student", "fake")] == [8, 8, 8]


# ---------------------------------------------------------------- what a word brings


@pytest.mark.parametrize("method", ["dcm", "dmd2", "flow_matching", "meanflow", "ode_regression", "rcm", "scm"])
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


def test_the_global_batch_is_not_the_clusters():
    for path in (CONFIGS / "cluster").glob("*.yaml"):
        assert "batch_size" not in path.read_text().replace("micro_batch_size", ""), path
        assert composed("experiment=wan2_1_t2v_1_3b_dmd2", f"cluster={path.stem}").batch_size == 8


def test_sizes_are_datas_alone():
    for path in CONFIGS.rglob("*.yaml"):
        if path.parent.name != "data":
            body = [line.partition("#")[0] for line in path.read_text().splitlines()]
            for size in ("num_frames:", "height:", "width:", "fps:"):
                assert not any(line.strip().startswith(size) for line in body), (
                    f"{path}: data=NAME could not replace it"
                )


# ---------------------------------------------------------------- experiments that were


@pytest.mark.parametrize("method", ["dmd2", "rcm"])
@pytest.mark.parametrize("network", ["1_3b", "14b"])
@pytest.mark.parametrize("kind", ["720p", "4nodes", "720p_4nodes"])
def test_an_experiment_of_earlier_versions_says_what_composes_it(network, method, kind):
    parts = kind.split("_")
    old = "_".join(
        ["wan2_1_t2v", network, *(p for p in parts if p == "720p"), method, *(p for p in parts if p != "720p")]
    )
    with pytest.raises(UserError) as caught:
        compose_config([f"experiment={old}", "steps=3"])
    message = str(caught.value)
    assert message.startswith(f"there is no experiment={old} any more; use ") and "\n" not in message
    words = message.partition("; use ")[2].partition(",")[0].split()
    wanted = (network, method), "720p" if "720p" in parts else "480p", 4 if "4nodes" in parts else 1
    assert words == named(wanted) and f"run_dir=runs/{old}" in message
    assert composed(*words)
