"""Numbers that the Wan recipes cite: a recipe composes what its source has, or the difference has a reason here.

Sources and their commits are at the head of each recipe. docs/methods/README.md lists them.
"""

from pathlib import Path

import pytest

from distill.config import compose_config
from tests.tiers import parametrize

RECIPES = Path(__file__).parents[2] / "configs" / "recipe"
ADDED = "the source adds its guidance to the conditional estimate, so our w is one more"
ONE_NODE = "one clip on each of 8 GPUs"
PER_GPU = "the source sets a batch per GPU only"
NO_END = "the source sets no end"
BUDGET = "the source stops at 100,000 at the latest; 1,200 updates with both losses here"
TINY_STEP = "the source begins at its largest time, .999, and truncates"
NO_SAMPLER = "the source has a set of states, and names no sampler"
NONE = object()
"""The source sets no such number, or the recipe does not cite it."""

SELF_FORCING = {
    "optim.student.lr": 2e-6, "optim.fake.lr": 4e-7, "optim.clip": 10.0, "method.shift": 5.0,
    "method.guidance_scale": (3.0, ADDED), "steps": (NONE, NO_END), "batch_size": (64, ONE_NODE),
    "method.fake_updates_per_student_update": 5, "method.step_list": [1.0, 0.9375, 0.8333, 0.625],
}  # fmt: skip
SPARSE = {
    "optim.student.lr": 2e-6, "optim.fake.lr": (NONE, "ours"), "optim.clip": (NONE, "ours"), "steps": (NONE, "ours"),
    "method.guidance_scale": (NONE, "ours"), "batch_size": (NONE, "ours"), "method.step_list": [1.0, 0.757, 0.522],
    "method.fake_updates_per_student_update": 5, "student.sparse_attention.sparsity": 0.8,
    "student.sparse_attention.tile": [4, 4, 4],
}  # fmt: skip
RCM = {
    "optim.student.lr": 2e-6, "optim.fake.lr": 4e-7, "optim.clip": None, "method.shift": 5.0,
    "method.guidance_scale": 5.0, "steps": (100_000, BUDGET), "batch_size": (NONE, PER_GPU),
    "method.student_every": 5, "method.mid_times": [1.5, 1.4, 1.0],
}  # fmt: skip
RCM_14B = RCM | {"optim.student.lr": 1e-6, "optim.fake.lr": 1e-7, "method.student_every": 10}
SCM = {key: RCM[key] for key in RCM if "fake" not in key and key not in ("method.shift", "method.student_every")}
DCM = {key: RCM[key] for key in SCM if key != "method.mid_times"} | {
    "method.shift": 5.0, "method.grid_steps": 48,
    "method.step_list": [1.0, 0.9338, 0.8529, 0.609],
}  # fmt: skip
FASTGEN = {"optim.clip": 10.0, "batch_size": (NONE, PER_GPU), "optim.student.warmup": 0}
SFT = FASTGEN | {
    "optim.student.lr": 5e-5, "method.guidance_scale": 5.0, "method.shift": 1.0, "steps": (NONE, "ours"),
    "sample.student_steps": [50],
}  # fmt: skip
CAUSAL = {
    "optim.student.lr": 2e-6, "optim.clip": 10.0, "method.shift": 5.0, "batch_size": (64, ONE_NODE),
    "optim.student.warmup": 0,
}  # fmt: skip
CITED = {
    "wan2_1_t2v_1_3b_dmd2": SELF_FORCING,
    "wan2_1_t2v_1_3b_dfd": SELF_FORCING | {
        "optim.student.lr": 1e-5, "optim.fake.lr": 1e-5, "method.guidance_scale": 5.0, "steps": 100, "batch_size": 16,
        "method.fake_updates_per_student_update": 4, "method.data_forcing": 0.5, "method.student_input": "clips",
    },
    "wan2_1_t2v_1_3b_sparse_dmd2": SPARSE,
    "wan2_1_t2v_14b_sparse_dmd2": SPARSE | {"student.sparse_attention.sparsity": 0.9},
    "wan2_1_t2v_1_3b_pdmd": SELF_FORCING | {
        "optim.student.lr": 4e-7, "optim.fake.lr": 8e-8, "method.guidance_scale": 5.0, "method.projection": True,
        "method.fake_updates_per_student_update": 1,
    },
    "wan2_1_t2v_1_3b_pdd": {
        "optim.student.lr": 1e-5, "optim.clip": (NONE, "not quoted"), "method.guidance_scale": 5.0, "steps": 250,
        "batch_size": 256, "method.shift": 6.0, "method.grid_steps": 128, "method.solver": "midpoint",
    },
    "wan2_1_t2v_14b_dmd2": SELF_FORCING | {"method.guidance_scale": (5.0, ADDED)},
    "wan2_1_t2v_1_3b_self_forcing": SELF_FORCING | {"batch_size": 64, "steps": (600, "120 student updates more")},
    "wan2_1_t2v_14b_self_forcing": SELF_FORCING | {
        "method.guidance_scale": (3.0, "that of the 14B recipe of DMD2: nobody has published such a student"),
        "batch_size": 64, "steps": (600, "120 student updates more"),
    },
    "wan2_2_t2v_a14b_dmd2": SELF_FORCING | {
        "method.guidance_scale": (4.0, ADDED), "method.guidance_scale_2": (3.0, ADDED),
        "batch_size": (NONE, "one clip on each of 32 GPUs"),
    },
    "wan2_2_t2v_a14b_phased_dmd": SELF_FORCING | {
        "method.guidance_scale": (4.0, ADDED), "method.guidance_scale_2": (3.0, ADDED),
        "batch_size": (64, "one clip on each of 32 GPUs"), "student.experts": "high", "student.ema.decay": 0.99,
    },
    "wan2_2_ti2v_5b_dmd2": {
        "optim.student.lr": 4e-6, "optim.fake.lr": 2e-6, "optim.clip": 1.0, "method.shift": 5.0,
        "method.guidance_scale": (3.0, ADDED), 
        "steps": (4000, "its loop steps: 4,000 fake updates, and 800 of the student among them"),
        "batch_size": (64, ONE_NODE), "method.fake_updates_per_student_update": 5,
        "method.step_list": [1.0, 0.757, 0.522],
    },
    "wan2_1_t2v_1_3b_rcm": RCM,
    "wan2_1_t2v_14b_rcm": RCM_14B,
    "wan2_1_t2v_1_3b_scm": SCM,
    "wan2_1_t2v_14b_scm": SCM | {"optim.student.lr": 1e-6},
    "wan2_1_t2v_1_3b_dcm": DCM,
    "wan2_1_t2v_14b_dcm": DCM | {"optim.student.lr": 1e-6},
    "wan2_1_t2v_1_3b_flow_matching": SFT,
    "wan2_1_t2v_14b_flow_matching": SFT,
    "wan2_1_t2v_1_3b_meanflow": FASTGEN | {
        "optim.student.lr": 1e-5, "optim.clip": None, "method.guidance_scale": 3.0, "steps": (NONE, "ours"),
        "method.time_shift": 1.0, "method.tangent_warmup": 2000,
    },
    "wan2_1_t2v_1_3b_ode_regression": FASTGEN | {
        "optim.student.lr": 7e-5, "steps": 10_000, "method.guidance_scale": (NONE, NO_SAMPLER),
        "method.shift": (NONE, NO_SAMPLER), "method.step_list": ([0.999, 0.937, 0.833, 0.624], TINY_STEP),
    },
    "wan2_1_t2v_1_3b_causal_teacher": CAUSAL | {
        "method.guidance_scale": 3.0, "steps": 2000, "method.weight": "gaussian", "student.causal.chunk": 3,
    },
    "wan2_1_t2v_1_3b_causal_dcm": CAUSAL | {
        "method.guidance_scale": 3.0, "steps": 3000, "method.grid_steps": 48, "student.ema.decay": 0.99,
        "method.step_list": [1.0, 0.9375, 0.8333, 0.625],
    },
    "wan2_1_t2v_1_3b_causal_ode_regression": CAUSAL | {
        "method.guidance_scale": 6.0, "steps": 1000, "method.step_list": [1.0, 0.9375, 0.8333, 0.625],
    },
}  # fmt: skip
LTX2_3 = {
    "steps": (1000, "its iterations update the student; five updates of the fake score follow each"), "batch_size": 4,
    "method.step_list": [1.0, 0.75, 0.5, 0.25], "method.student_sampler": "ode", "method.guidance_scale": 3.0,
    "method.shift": 5.0, "method.min_time": 0.02, "method.max_time": 0.98, "method.audio_weight": 1.0,
    "method.fake_updates_per_student_update": 5, "optim.clip": 1.0, "student.lora.rank": 128, "fake.lora.rank": 128,
    "student.lora.scale": 1.0, "data.num_frames": 241, "data.height": 768, "data.width": 512, "data.fps": 25.0,
    "optim.student.betas": [0.9, 0.999], "optim.student.weight_decay": 0.01, "optim.fake.weight_decay": 0.01,
}  # fmt: skip
MINIMAX_H3 = LTX2_3 | {
    "batch_size": 1, "method.step_list": [1.0, 0.947368, 0.857143, 0.666667], "method.guidance_scale": 1.0,
    "method.shift": 6.0, "method.audio_shift_ratio": 0.5, "method.teacher_shift": 12.0, "method.time_limits": "draw",
    "data.num_frames": 124, "data.width": 1344, "data.fps": 24.0,
}  # fmt: skip
REF2AV_H3 = MINIMAX_H3 | {
    "batch_size": (32, "on one group of ranks"), "method.shift": 12.0, "method.audio_shift_ratio": 0.25,
    "method.max_time": 1.0, "method.step_list": [1.0, 0.988235, 0.972973, 0.952381, 0.923077, 0.878049, 0.8, 0.631579],
    "student.lora.scale": 0.0625, "optim.student.betas": [0.0, 0.999], "optim.fake.betas": [0.0, 0.999],
}  # fmt: skip
PDMD_H3 = MINIMAX_H3 | {
    "steps": 2500, "batch_size": 16, "method.projection": True, "method.step_list": [1.0, 0.75, 0.5, 0.25],
    "method.shift": 1.0, "method.audio_shift_ratio": 1.0, "method.min_time": 0.0, "method.max_time": 1.0,
    "method.score_noise": "own", "method.score_interval": "step", "method.fake_rollout": "full",
    "method.max_error": 5.0,
    "optim.student.betas": [0.0, 0.9], "optim.student.weight_decay": 0.0, "optim.fake.betas": [0.0, 0.9],
    "optim.fake.weight_decay": 0.0, "optim.student.clip": (1.0, ".8 times an error without the 1/2: .625 of it"),
    "data.height": 544, "data.width": (NONE, "20 sizes"),
}  # fmt: skip
SPARSE_H3 = {
    "steps": (1300, "updates of the student, with four of the fake score each"), "batch_size": 64,
    "method.guidance_scale": 1.0, "method.step_list": [1.0, 0.972973, 0.923077, 0.8], "method.shift": 12.0,
    "method.audio_shift_ratio": 0.25, "method.fake_updates_per_student_update": 4, "method.gan_weight_student": 0.0,
    "student.sparse_attention.sparsity": 0.9, "student.sparse_attention.tile": [4, 4, 4],
    "student.sparse_attention.warmup": None, "teacher.sparse_attention.sparsity": None,
    "fake.sparse_attention.sparsity": None, "student.master_dtype": "keep", "optim.student.lr": 1e-6,
    "optim.fake.lr": (NONE, "the source names one rate"), "optim.student.betas": [0.9, 0.999],
    "optim.student.weight_decay": 0.01, "optim.clip": 1.0, "student.lora.rank": 0,
}  # fmt: skip
SECOND_HAND = {
    "wan2_1_t2v_1_3b_pdmd": {"optim.student.lr", "optim.fake.lr", "method.guidance_scale",
                             "method.fake_updates_per_student_update"},
    "wan2_1_t2v_1_3b_pdd": {"optim.student.lr", "method.guidance_scale", "steps", "batch_size", "method.shift"},
}  # fmt: skip
"""Numbers that others quote from a paper."""
PDD_H3 = {
    "steps": 3000, "batch_size": 1, "method.grid_steps": 32, "method.steps": [8], "method.solver": "midpoint",
    "method.targets": 2, "method.shift": 12.0, "method.guidance_scale": 1.0, "optim.student.additions_lr": 1e-5,
    "optim.clip": (1.0, "of .5 + .5 times the parts' errors, half of our loss"), "student.ema.decay": 0.99,
    "student.lora.rank": 64, "student.lora.scale": 1.0, "data.num_frames": 124, "data.height": 768, "data.width": 1344,
}  # fmt: skip
ALIASES = {"teacher": "flow_matching", "dfd": "dmd2", "pdmd": "dmd2", "sparse_dmd2": "dmd2", "phased_dmd": "dmd2"}
"""Methods of the recipes that are not named after theirs."""
ALL = {"optim.student.lr", "optim.clip", "method.guidance_scale", "steps", "batch_size"}


def test_every_wan_recipe_has_a_row():
    assert CITED.keys() == {file.stem for file in RECIPES.glob("wan*.yaml")}


@parametrize("recipe", CITED, quick=1)
def test_a_recipe_composes_the_numbers_that_it_cites(recipe):
    model, method = next(
        (recipe.removesuffix(f"_{name}"), name)
        for name in (*ALIASES, *"self_forcing ode_regression flow_matching dmd2 rcm scm dcm meanflow pdd".split())
        if recipe.endswith(f"_{name}")
    )
    method = ALIASES.get(method, method)
    base = "wan2_1_t2v_1_3b_dmd2"
    config = compose_config(
        [f"experiment={base}", f"model={model.removesuffix('_causal')}", f"method={method}", f"recipe={recipe}"]
    )
    cited = CITED[recipe]
    assert cited.keys() >= ALL, "say each of these"
    check_numbers(config, cited)
    if hasattr(config.method, "fake_updates_per_student_update"):
        assert "optim.fake.lr" in cited and "method.fake_updates_per_student_update" in cited


@pytest.mark.parametrize("recipe", SECOND_HAND)
def test_a_recipe_says_which_numbers_are_quoted_by_others(recipe):
    assert SECOND_HAND[recipe] <= CITED[recipe].keys() and "second-hand" in (RECIPES / f"{recipe}.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "numbers", "rates"),
    [("ltx2_3_t2av_dmd2", LTX2_3, (1e-4, 2e-5)), ("ltx2_5_t2av_dmd2", LTX2_3, (1e-4, 2e-5)),
     ("minimax_h3_t2av_dmd2", MINIMAX_H3, (1e-4, 2e-5)), ("minimax_h3_ref2av_dmd2", REF2AV_H3, (5e-5, 4e-6)),
     ("minimax_h3_t2av_pdmd", PDMD_H3, (5e-5, 1e-5)), ("minimax_h3_t2av_pdd", PDD_H3, (1e-4,)),
     ("minimax_h3_t2av_sparse_dmd2", SPARSE_H3, ())],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_recipes_of_sound_compose_the_numbers_that_they_cite(name, numbers, rates):
    """The rates of adapters are ten times those of whole networks."""
    words = [f"experiment={name}", "data.path=captions.txt", "plan=true"]
    config = compose_config(words)
    check_numbers(config, numbers)
    for role, rate in zip(("student", "fake"), rates, strict=False):
        settings = getattr(config.optim, role)
        assert settings.lr * settings.lr_scale["*.lora_*"] == pytest.approx(rate)
    whole = compose_config([*words, "adapters=none"])
    assert not whole.student.lora.enabled and not whole.optim.student.lr_scale


def check_numbers(config, cited):
    for setting, value in cited.items():
        ours = config
        for name in setting.split("."):
            ours = getattr(ours, name)
        if isinstance(value, tuple):
            theirs, reason = value
            assert ours != theirs and reason, f"{setting}: {ours} is the source's, so it needs no reason"
        else:
            assert ours == value, setting
