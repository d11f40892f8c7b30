"""Settings that every test shares."""

import os

# Ranks share two cores: without this, each would start a thread per core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
