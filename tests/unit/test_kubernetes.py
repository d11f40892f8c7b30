"""The jobs for Kubernetes and their script in docs/running.md, by Kubeflow's published models and with a torchrun that
ends as told."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

TEXT = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
PAGE = TEXT.partition("## Kubernetes")[2].partition("\n## ")[0]
SCRIPT, RUNTIME, OLDER = (block.split("```")[0].partition("\n")[2] for block in PAGE.split("\n```")[1::2])


def paths(value, at=""):
    """Return the paths of all keys."""
    if isinstance(value, dict):
        return {at}.union(*(paths(item, f"{at}.{key}") for key, item in value.items()))
    return {at}.union(*(paths(item, f"{at}[]") for item in value)) if isinstance(value, list) else {at}


def test_the_jobs_have_only_known_keys():
    """The models accept misspelled keys and drop them, so the keys of a round trip are compared."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api 2.3.0")
    training = pytest.importorskip("kubeflow.training", reason="needs kubeflow-training 1.9.4")
    for given in yaml.safe_load_all(RUNTIME):
        kind = getattr(models, f"TrainerV1alpha1{given['kind']}")
        assert paths(given) == paths(kind.from_dict(given).to_dict()), given["kind"]
    misspelled = yaml.safe_load(RUNTIME.partition("---")[0].replace("maxRestarts", "maxRestart"))
    assert paths(misspelled) != paths(models.TrainerV1alpha1TrainingRuntime.from_dict(misspelled).to_dict())
    client, given = training.ApiClient(), yaml.safe_load(OLDER)

    class Answer:
        data = json.dumps(given)

    found = client.sanitize_for_serialization(client.deserialize(Answer, "KubeflowOrgV1PyTorchJob"))
    assert paths(given) == paths(found)


def test_both_jobs_run_one_script_with_room_to_save():
    (runtime, _), older = yaml.safe_load_all(RUNTIME), yaml.safe_load(OLDER)
    new = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for pod in (new, *(nodes["template"]["spec"] for nodes in older["spec"]["pytorchReplicaSpecs"].values())):
        assert pod["terminationGracePeriodSeconds"] > 240 and pod["containers"][0]["command"][1] == "/shared/start.sh"
    assert all(len(text.splitlines()) <= 44 for text in (RUNTIME, OLDER))


def start(tmp_path, does, **variables):
    """Start the script with a torchrun that ``does`` something."""
    (tmp_path / "status.json").write_text('{"state": "stopped"}')  # of an earlier start
    os.utime(tmp_path / "status.json", (1, 1))
    (tmp_path / "torchrun").write_text(f"#!/bin/bash\n{does}\n")
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "start.sh").write_text(SCRIPT.replace("cd /srv/fsdp-cp", f"cd {tmp_path}"))
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path)}
    return subprocess.Popen(["bash", tmp_path / "start.sh", "steps=2"], env=os.environ | variables)


def says(state):
    return f"""echo '{{"state": "{state}"}}' > "$RUN_DIR/status.json"; exit 1"""


@pytest.mark.parametrize(
    ("does", "variables", "code"),
    [
        ("exit 0", {}, 0),
        (says("stopped"), {}, 75),
        (says("stopped"), {"AGAIN": "138"}, 138),
        (says("running"), {}, 1),
        (says("failed"), {}, 2),
        ("exit 1", {}, 2),  # a refused start, next to the record of an earlier one
    ],
)
def test_the_script_ends_as_the_run_did(tmp_path, does, variables, code):
    assert start(tmp_path, does, **variables).wait(60) == code


def test_the_script_hands_the_signal_on_and_waits(tmp_path):
    saves = f"save() {{ sleep 0.5; {says('stopped')}; }}; trap save TERM; touch ready; while true; do sleep 0.05; done"
    process = start(tmp_path, saves)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
