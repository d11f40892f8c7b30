"""A command starts quickly: it imports only what it needs."""

import json
import subprocess
import sys

import pytest

import fsdp_cp

HEAVY = ["diffusers", "transformers", "peft", "scipy", "matplotlib", "av", "torch.distributed.tensor"]


def python(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["mesh.dpp=2"], 2)])
def test_help_and_a_misspelled_key_import_nothing_heavy(words, code):
    program = "import json, sys, train; code = train.main(sys.argv[1:]); print(json.dumps([code, *sys.modules]))"
    ended, *imported = json.loads(python("-c", program, *words).stdout.splitlines()[-1])
    assert ended == code
    assert "torch" in imported and not set(HEAVY) & set(imported)


def test_public_names_are_importable():
    assert all(getattr(fsdp_cp, name).__name__ == name for name in fsdp_cp.__all__)
