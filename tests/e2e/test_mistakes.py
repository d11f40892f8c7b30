"""A user's mistakes: exit code 2, one line that names the setting, and no file written or changed."""

import ast
import os
import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distill.config.schema import SETTINGS
from tests.e2e import mistakes
from tests.e2e.launch import QUICK, ROOT, TINY
from tests.tiers import slow
from train import main

TEACHER, CAUSAL = ROOT / "assets" / "quickstart_teacher", ROOT / "assets" / "quickstart_causal_teacher"

# Command lines, and the name that the error must have. Words alone are those of train.py in a dry run on one process;
# NAME=VALUE before train.py is the environment. {run} and {other} are finished runs, {things} holds a user's files,
# {new} does not exist.
MISTAKES = {
    "settings": [
        ("steps=0", "steps"),
        ("steps=2.5", "steps"),
        ("steps=", "steps"),
        ("seed=9223372036854775808", "seed"),
        ("precision=fp16", "precision"),
        ("student.communication_buffers=pooled", "student.communication_buffers=pooled was removed"),
        ("data.colour_shares=null", "data.colour_shares was renamed; use data.color_shares"),
        ("student.gather_early=true", "student.gather_early was removed"),
        ("attention.backend=flash_attn_3", "attention.backend=flash_attn_3 was removed"),
        ("attention.backend=transformer_engine", "attention.backend=transformer_engine was removed"),
        ("mesh_check=true", "mesh_check"),
        ("dry_run=maybe", "dry_run"),
        ("optim.student.betas=0.9", "optim.student.betas"),
        ("optim.student.lr=nan", "optim.student.lr"),
        ("'steps=${nothing}'", "steps"),
        ("batch_sise=4", "batch_size"),
        ("method.mid_times=[1.5]", "method=rcm"),
        ("student.ema=0.99", "student.ema."),
        ("experiment=quikstart", "quickstart"),
        ("experiment=wan2_1_t2v_14b_720p_dmd2", "wan2_1_t2v_14b_dmd2"),
        ("~steps", "steps"),
        ("--steps 5", "steps="),
        ("steps", "steps"),
        ("hydra.run.dir={new}", "run_dir"),
        ("--multirun steps=1,2", "dry_run"),
        ("CUDA_VISIBLE_DEVICES=-1 train.py device=cuda dry_run=false", "device"),
        ("mesh.dp=2", "mesh.dp_shard"),
        ("cluster=h20", "h20x4 or h20x8 or h20x8x4"),
        ("data.num_frames=21,41", "distill.sweep"),
        ("data.num_frames=many", "data.num_frames"),
        ("checkpoint.keep=-1", "checkpoint.keep"),
        ("timeout.step=60.5", "timeout.step"),
        ("export.weights=ema student.ema.enabled=false", "export.weights"),
        ("optim.fake.lr_scale={a:true}", "optim.fake.lr_scale"),
        ("optim.fake.lr_scale={a:nan}", "optim.fake.lr_scale"),
        ("optim.fake.betas=[0.9,1.0]", "optim.fake.betas"),
        ("SLURM_STEP_NUM_TASKS=2 train.py", "SLURM_STEP_NUM_TASKS=2"),
    ],
    "mesh": [
        ("mesh.cp=2", "mesh.cp"),
        ("WORLD_SIZE=6 train.py", "batch_size"),
        ("world=8 mesh.cp=8 mesh.ulysses=8", "mesh.ulysses"),
        ("world=2 mesh.cp=2 mesh.ulysses=2 mesh.ring=2", "mesh.ring"),
        ("world=2 plan=true", "dry_run"),
        ("world=8 mesh.dp_replicate=8", "mesh.dp_replicate"),
        ("micro_batch_size=5", "micro_batch_size"),
        ("dry_run=false world=4", "world"),
        ("attention.backend=cudnn", "attention.backend"),
        ("device=cuda world=2 attention.backend=flash9", "attention.backend"),
    ],
    "roles": [
        ("teacher.checkpoint={things}", "teacher.checkpoint"),
        ("student.checkpoint={things}/wrong_class", "student.checkpoint"),
        ("student.checkpoint={things}/wrong_shape", "student.checkpoint"),
        ("student.checkpoint={things}/deeper", "student.checkpoint"),
        ("student.checkpoint={things}/torn", "student.checkpoint"),
        ("student.checkpoint=null student.architecture={num_layer:2}", "student.architecture.num_layers"),
        ("experiment=quickstart_teacher student.architecture.text_dim=64", "student.architecture"),
        ("experiment=quickstart_teacher student.architecture.in_channels=4", "student.architecture"),
        ("student.family=hunyuan", "student.family"),
        ("PATH={things} train.py dry_run=false student.compile=true", "student.compile"),
        ("student.backward_prefetch=0", "student.backward_prefetch"),
        ("student.master_dtype=bf16 precision=bf16", "student.ema"),
        ("experiment=quickstart_teacher student.causal.chunk=4", "4 or 8"),
        ("experiment=quickstart_teacher student.causal.chunk=7", "student.causal.chunk"),
        ("adapters=lora student.fp8=torchao", "student.fp8"),
        ("dry_run=false student.fp8=transformer_engine", "student.fp8"),
        ("student.precision=fp8", "student.precision"),
        ("student.causal.window=2", "student.causal.chunk"),
        ("student.causal.chunk=1 student.causal.context_time=1", "student.causal.context_time"),
        ("optim.student.no_decay=[*.bais]", "optim.student.no_decay"),
    ],
    "data": [
        ("data.num_frames=5", "data.num_frames"),
        ("data.height=18", "data.height"),
        ("data.negative_prompt=blurry", "data.negative_prompt"),
        ("'sample.captions=[a purple cow]'", "sample.captions"),
        ("data=video_folder", "data.path"),
        ("data=captions", "sample.report_clips"),
        ("sample.student_steps=[5]", "sample.student_steps"),
    ],
    "methods": [
        ("method.step_list=[1000,750]", "method.step_list"),
        ("method.gan_weight_student=1e-3 method.gan_blocks=[1,99]", "method.gan_blocks"),
        ("experiment=quickstart_rcm method.student_every=1", "method.student_every"),
        ("experiment=quickstart_scm method.jvp=finite_difference precision=bf16", "method.jvp"),
        ("experiment=quickstart_meanflow method.jvp=finite_difference student.fp8=transformer_engine", "student.fp8"),
        ("experiment=quickstart_rcm student.fp8=torchao student.fp8_gather=true", "student.fp8_gather"),
        ("experiment=quickstart_dcm student.ema.enabled=false", "student.ema.enabled"),
        ("experiment=quickstart_ode_regression", "distill.teacher_clips"),
        ("experiment=quickstart_self_forcing", "python train.py experiment=quickstart_causal_dcm"),
        ("experiment=quickstart_ode_regression method.trajectories=x", "method.trajectories"),
        ("experiment=quickstart_teacher method.history=clean", "method.history"),
        ("student.causal.chunk=1", "method=dmd2"),
        ("experiment=quickstart_rcm student.causal.chunk=1 teacher.causal.chunk=1", "method=rcm"),
        (f"method=self_forcing student.checkpoint={TEACHER}", "student.causal.chunk"),
        (f"method=self_forcing student.checkpoint={CAUSAL} teacher.causal.chunk=1", "teacher.causal.chunk=1"),
        (f"method=self_forcing student.checkpoint={CAUSAL} fake.checkpoint={CAUSAL}", "fake.c"),
        ("method=self_forcing method.step_list_first=[0.9]", "method.step_list_first"),
        ("method=self_forcing method.fake_knows_last_step=true method.exit=each", "method.fake_knows_last_step"),
        ("experiment=quickstart_meanflow student.causal.chunk=1", "method=meanflow"),
        ("experiment=quickstart_dcm student.causal.chunk=1", "teacher.causal.chunk=null"),
        ("experiment=quickstart_scm student.causal.chunk=2 teacher.causal.chunk=1", "student.causal.chunk=2"),
    ],
    "runs and checkpoints": [
        ("run_dir={things}", "run_dir"),
        ("run_dir={things}/file.txt/run", "run_dir"),
        ("dry_run=false checkpoint.resume={things}", "checkpoint.resume"),
        ("dry_run=false checkpoint.resume={things}/damaged/checkpoints/step_00000002", "state.json"),
        ("dry_run=false run_dir={run} steps=2 optim.student.lr=0.5", "optim.student.lr"),
        ("dry_run=false run_dir={run} steps=1", "steps"),
        ("dry_run=false run_dir={run} steps=3 seed=1", "seed"),
        ("dry_run=false run_dir={other} steps=3 checkpoint.resume={run}", "run_dir"),
    ],
    "commands": [
        ("python -m distill.encode {new} {new} --verify {things}", "--verify"),
        ("python -m models.export {new} {new}", "RUN"),
        ("python -m models.export {run} {things}/export_and_mine", "OUT"),
        ("python -m models.lora.__main__ extract {things} {things} {new}", "FULL"),
        ("python -m models.verify nobody", "nobody"),
        ("python -m distill.sample {run} --steps 5", "--steps"),
        ("python -m distill.sample {run} --out {things}", "--out"),
        ("python -m distill.sample {run} --frames 12", "--frames"),
        ("python -m distill.teacher_clips experiment=quickstart_teacher mesh.cp=1 {new}", "method="),
        ("python -m distill.teacher_clips experiment=quickstart mesh.cp=1 device=cpu {things}", "OUT"),
    ],
}
# Settings that look like mistakes and are accepted, each with its value in the run's configuration.
ACCEPTED = [
    ("\"run_dir={home}/it's (1) [2] {3} a=b, größe_数 #5 50% & ; | \\\\\"", "run_dir",
     "{home}/it's (1) [2] {3} a=b, größe_数 #5 50% & ; | \\"),
    ("'run_dir=\"{home}/quoted, too\"'", "run_dir", "{home}/quoted, too"),
    ("run_dir=~/run", "run_dir", "{home}/run"),
    ("run_dir=relative/run", "run_dir", "relative/run"),
    ("data=captions sample.report_clips=0 'data.negative_prompt=色调, {y: 2}, [z]'", "data.negative_prompt",
     "色调, {y: 2}, [z]"),
    ("steps=5 steps=6", "steps", 6),
    ("'steps=${batch_size}'", "steps", 16),
    ("optim.clip=null", "optim.clip", None),
    ("optim.student.lr_scale={blocks.*:0.5}", "optim.student.lr_scale", {"blocks.*": 0.5}),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder where every command line is typed. Its files must keep every byte."""
    base = mistakes.make_place(tmp_path_factory.mktemp("mistakes").resolve())
    before = mistakes.hashes(base)
    yield base
    assert mistakes.hashes(base) == before


def _some_are_quick(rows):
    """Return the rows with their command line as id; ``make test`` takes every eighth."""
    return [pytest.param(*row, id=row[0], marks=slow if n % 8 else ()) for n, row in enumerate(rows)]


@pytest.mark.parametrize(("typed", "name"), [row for kind in MISTAKES.values() for row in _some_are_quick(kind)])
def test_a_mistake_is_one_line_and_changes_nothing(place, typed, name):
    before = mistakes.listing(place)
    outcome = mistakes.attempt(typed, place, QUICK_AND_DRY if "dry_run=false" in typed else mistakes.DRY)
    assert outcome.code == 2, outcome
    (line,) = outcome.error.splitlines()
    assert line.startswith("error: ") and name in line
    assert mistakes.listing(place) == before


QUICK_AND_DRY = dict(word.split("=", 1) for word in (*QUICK, *TINY)) | mistakes.DRY


@pytest.mark.parametrize(("typed", "key", "value"), _some_are_quick(ACCEPTED))
def test_an_unusual_value_arrives_as_typed(place, typed, key, value, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(place / "home"))
    _, _, words = mistakes.command_of(typed, place, {"device": "cpu", "mesh.cp": "1"})
    assert main([*words, "--cfg", "job"]) == 0
    found = OmegaConf.select(OmegaConf.create(capsys.readouterr().out), key)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == (mistakes.filled(value, place) if isinstance(value, str) else value)


def test_a_dry_run_writes_nothing(place):
    before = mistakes.listing(place)
    assert mistakes.attempt("run_dir={new}", place, mistakes.DRY).code == 0
    assert mistakes.listing(place) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path, capsys):
    tmp_path.chmod(0o500)
    try:
        assert main([*QUICK, "mesh.cp=1", "steps=1", "device=cpu", f"run_dir={tmp_path}/run"]) == 2
        assert "run_dir" in capsys.readouterr().err
    finally:
        tmp_path.chmod(0o700)


SPY = "tests.e2e.imported_by_a_setting"
"""A module that would be imported if ``_target_`` were more than text."""
NUMBERS = st.one_of(
    st.integers(-(10**25), 10**25),
    st.integers(-3, 20),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["nan", "1e400", "-0.0", "0x10", "1_000", "1e-320", "٣", "1e", "--5"]),
).map(str)
WORDS = st.one_of(
    st.sampled_from("null true False yes off auto ??? never fp32 none full ~ .. a/b".split()),
    st.text(max_size=12),
    st.text(st.sampled_from("'\"\\{}[]()$,:=#&;~ ?*"), min_size=1, max_size=8),
    st.sampled_from(["x" * 10**4, "y/" * 10**4, "a\nb", "a\tb"]),
)
NESTED = st.sampled_from([
    f"{{_target_:{SPY}.run}}", f"[{{_target_:{SPY}.run}}]", "${oc.env:HOME}", "${steps}", "${.lr}", "${",
    "!!python/object/apply:os.getcwd []", "{}", "[]", "{a: 1, b: [2, {c: 3}]}", "[null]", "choice(1,2)", "int(3.0)",
])  # fmt: skip


MEANT = {"${steps}": 1, "${.lr}": 1e-4, "int(3.0)": 3}
"""Values that Hydra's grammar makes of texts, so that settings of their kind rightly take them."""


def _kind_of(value):
    """Return the Python value that a text reads as, or the text itself."""
    if value in MEANT:
        return MEANT[value]
    try:
        return ast.literal_eval({"true": "True", "false": "False", "null": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _typed_settings():
    """Yield key, kind and optionality of every number and switch of the quickstart."""
    for key, owners in SETTINGS.items():
        kind, *others = owners[0].types
        chosen = {"method": "dmd2", "data": "moving_shapes"}.get(key.partition(".")[0])
        if not others and kind in (int, float, bool):
            if chosen is None or any(owner.owner.name == chosen for owner in owners):
                yield key, kind, owners[0].optional


@slow
def test_no_value_of_another_kind_is_taken(tmp_path, monkeypatch):
    """Random values either suit the setting's kind, or are refused in one line with its name. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = mistakes.listing(tmp_path)

    @settings(
        max_examples=25,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],  # a failing example is clear enough, and shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(chosen=st.sampled_from(sorted(_typed_settings(), key=str)), value=st.one_of(NUMBERS, WORDS, NESTED))
    def check(chosen, value):
        key, kind, optional = chosen
        others = [word for word in ("device=cpu", "mesh.cp=1") if not word.startswith(f"{key}=")]
        outcome = mistakes.called(main, [*others, "dry_run=true", f"{key}={value}"])
        assert SPY not in sys.modules and mistakes.listing(tmp_path) == before
        if outcome.code == 2:
            (line,) = outcome.error.splitlines()
            assert line.startswith("error: ") and (key in line or f"{key.rpartition('.')[0]}.*" in line)
            return
        meant = _kind_of(value.strip())
        assert outcome.code == 0, outcome
        if meant is None:
            assert optional
        elif kind is bool:
            assert value.strip().lower() in "true false yes no on off y n 0 1".split()
        else:
            assert isinstance(meant, int if kind is int else int | float) and not isinstance(meant, bool)
            assert abs(meant) < 4e38

    check()
