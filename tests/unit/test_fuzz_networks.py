"""Generated damage to networks, runs and checkpoints, as a user's command reads them.

Each example must give what it would have given, or one line (``UserError``): no other exception, no hang, and no change
outside the folder that the command writes. The examples are the same in every run.
"""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from distill.config import compose_config, load_config
from fsdp_cp import build_mesh
from fsdp_cp.checkpoint.save_load import Checkpoints
from fsdp_cp.launch import process_group
from models.export import main as export_command
from models.roles.load import build_role
from models.roles.role_plan import plan_role
from tests.unit.damage import BYTES, CHANGES, changed_json, command, damaged, examples, refusal, snapshot
from tests.unit.test_checkpoint_files import SMALL

CPU = torch.device("cpu")
LATENTS, TEXT = (2, 2, 4, 4), {"text": (3, 6)}


# ---------------------------------------------------------------- networks


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("network")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        WanTransformer3DModel(**SMALL).save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.slow
def test_networks_are_built_or_refused(tmp_path, network, around):
    folder, before = tmp_path / "network", snapshot(around, network)
    files = sorted(p.name for p in network.iterdir())
    texts = [name for name in files if name.endswith(".json")]

    def build():
        plan = plan_role("student", checkpoint=str(folder))
        role = build_role(
            plan, mesh=build_mesh(cp=1, heads=2), device=CPU, trainable=False, 
            shapes={"video": LATENTS}, condition_shapes=TEXT,
        )  # fmt: skip
        assert all(weight.to_local().isfinite().all() for weight in role.weights().values())

    @examples(12)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(network, folder)
        file = folder / name
        if text and name in texts:
            file.write_text(changed_json(file.read_text(), changes))
        else:
            size = int.from_bytes(file.read_bytes()[:8], "little") if name not in texts else 0
            file.write_bytes(damaged(file.read_bytes(), steps, head=8 + min(size, 4096)))
        inside = snapshot(folder)
        refusal(build)
        assert snapshot(folder) == inside and snapshot(around, network) == before

    with process_group(CPU):
        run()


def test_architectures_are_planned_or_refused():
    @examples(60)
    @given(changes=CHANGES)
    def run(changes):
        architecture = json.loads(changed_json(json.dumps(SMALL), changes))
        refusal(
            lambda: plan_role("student", checkpoint=None, architecture=architecture).tokens({"video": LATENTS}, TEXT)
        )

    run()


# ---------------------------------------------------------------- commands


VALUES = (
    "null|true|-1|0|1e9|.nan|.inf|x|[]|{}|[1, a]|{a: 1}|'|!!python/name:os.system|${seed}|${nowhere}|${oc.env:HOME}"
    "|&a [*a]|2001-01-01|\udcff|???|99999999999999999999999"
)
LINE = st.tuples(
    st.integers(0, 10**6), st.sampled_from(["cut", "drop", "value", "key"]), st.sampled_from(VALUES.split("|"))
)


def changed_yaml(text: str, lines) -> bytes:
    rows = text.splitlines()
    for number, what, value in lines:
        at = number % len(rows)
        key, _, _ = rows[at].partition(":")
        rows[at] = {"cut": rows[at][: len(value)], "drop": "", "value": f"{key}: {value}", "key": f"{key}x: {value}"}[
            what
        ]
    return "\n".join(rows).encode("utf-8", "surrogateescape")


@pytest.mark.slow
def test_configurations_are_loaded_or_refused(tmp_path):
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(compose_config([]))))

    @examples(50)
    @given(lines=st.lists(LINE, min_size=1, max_size=3), steps=st.none() | BYTES)
    def run(lines, steps):
        content = changed_yaml(text, lines)
        (tmp_path / "config.yaml").write_bytes(content if steps is None else damaged(content, steps))
        refusal(lambda: load_config(tmp_path / "config.yaml"))

    run()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Write a run directory with a checkpoint, as the trainer writes it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with process_group(CPU):
        plan = plan_role("student", checkpoint=None, architecture=SMALL)
        role = build_role(
            plan, mesh=build_mesh(cp=1, heads=2), device=CPU, trainable=True, 
            shapes={"video": LATENTS}, condition_shapes=TEXT,
        )  # fmt: skip
        tensors = {"student": {"weights": role.weights()}}
        numbers = {"step": 7, "configs": {"student": role.config}}
        Checkpoints(folder / "checkpoints", keep=1).save(7, tensors, numbers)
    return folder


def test_exports_are_made_or_refused(tmp_path, checkpoints, around):
    folder, out, before = tmp_path / "run", tmp_path / "out", snapshot(around, checkpoints)
    step = checkpoints / "checkpoints" / "step_00000007"
    files = sorted(p.name for p in step.iterdir())
    made = []

    @examples(40)
    @given(name=st.sampled_from(files), steps=BYTES, changes=CHANGES, text=st.booleans())
    def run(name, steps, changes, text):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(checkpoints, folder)
        file = folder / "checkpoints" / step.name / name
        if text and name == "state.json":
            file.write_text(changed_json(file.read_text(), changes))
        else:
            file.write_bytes(damaged(file.read_bytes(), steps))
        inside, earlier = snapshot(folder), snapshot(out)
        said = command(export_command, folder, out)
        made.append(said is None)
        assert snapshot(folder) == inside and snapshot(around, checkpoints) == before
        assert said is None or snapshot(out) == earlier, "a refused export leaves the earlier one"
        assert {p.name for p in tmp_path.iterdir()} <= {"run", "out"}

    run()
    assert not all(made)
