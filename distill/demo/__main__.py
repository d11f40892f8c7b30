"""Entry point of ``python -m distill.demo``."""

from distill.demo.command import main
from fsdp_cp.launch import end_process

if __name__ == "__main__":
    end_process(main() or 0)  # --help calls sys.exit(0) in main, and `recorded` turns that into None
