"""Entry point of ``python -m distill.sweep``."""

import sys

from distill.sweep.command import main
from fsdp_cp.launch import end_process

if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
