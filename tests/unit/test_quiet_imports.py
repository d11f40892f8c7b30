"""A command's own line is the first on stderr, also where torchao is installed, which diffusers imports with itself."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_importing_networks_says_nothing():
    done = subprocess.run([sys.executable, "-c", "import models.families.wan, distill.trainer"], capture_output=True)
    assert done.returncode == 0 and done.stderr == b""
