"""Name of a removed command: :mod:`distill.teacher_clips` replaced it."""

import sys

if __name__ == "__main__":
    sys.stderr.write(
        "python -m distill.trajectories was removed; make a set with python -m distill.teacher_clips --states, and"
        " train with data=encoded\n"
    )
    sys.exit(2)
