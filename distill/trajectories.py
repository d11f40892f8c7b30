"""Name of a removed command, which :mod:`distill.teacher_clips` replaced."""

import sys


def main(arguments: list[str] | None = None) -> int:
    """Name the successor on standard error; return exit code 2."""
    sys.stderr.write(
        "error: python -m distill.trajectories was removed; make a set with python -m distill.teacher_clips --states,"
        " and train with data=encoded\n"
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
