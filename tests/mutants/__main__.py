"""Put known faults into a copy of the project and run the tests that must fail: ``python -m tests.mutants``.

    python -m tests.mutants list              print name, harm and killing test of each fault
    python -m tests.mutants check             check that each fault fits the code in exactly one place
    python -m tests.mutants run [NAME ...]    run each fault's killing test (all faults by default)
    python -m tests.mutants diff NAME         print the fault as a patch, for ``git apply``

``run`` works on a temporary copy of the tracked files, as they are on disk. It exits with 1 if a fault survives.
"""

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PRODUCT = ("fsdp_cp", "models", "distill", "train.py")


def places(fault: Fault, root: Path = ROOT) -> list[Path]:
    """Return the product file that holds ``fault.old``, once for each time it occurs."""
    files = [file for part in PRODUCT for file in sorted((root / part).rglob("*.py")) or [root / part]]
    return [file for file in files for _ in range(file.read_text().count(fault.old))]


def changed(fault: Fault, root: Path = ROOT) -> tuple[Path, str]:
    """Return the file of a fault and its text with the fault in it.

    Raises:
        ValueError: ``fault.old`` does not occur exactly once.
    """
    found = places(fault, root)
    if len(found) != 1:
        raise ValueError(f"{fault.name}: its code occurs {len(found)} times, not once: update tests/mutants/faults.py")
    return found[0], found[0].read_text().replace(fault.old, fault.new)


def survives(fault: Fault) -> str | None:
    """Run the killing test on a copy of the project with the fault; return why the fault survives, or None."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in subprocess.check_output(["git", "-C", str(ROOT), "ls-files", "-z"], text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        file, text = changed(fault, root)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{fault.killed_by}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        file.write_text(text)
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    # Pytest exits with 1 only when a test ran and failed; a missing test or a failed collection is not a kill.
    return None if done.returncode == 1 else f"pytest exit code {done.returncode}\n{done.stdout[-2000:]}"


def main(words: list[str]) -> int:
    """Return exit code 0, 1 if a fault survives or does not fit, 2 for unknown words."""
    by_name = {fault.name: fault for fault in FAULTS}
    if words[:1] == ["run"] and set(words[1:]) <= set(by_name):
        survivors = 0
        for name in words[1:] or by_name:
            began = time.monotonic()
            why = survives(by_name[name])
            survivors += why is not None
            verdict = "killed" if why is None else f"SURVIVED ({why})"
            print(f"{name:28} {time.monotonic() - began:5.0f} s  {verdict}  {by_name[name].killed_by}", flush=True)
        print(f"{survivors} survived")
        return int(survivors > 0)
    if words == ["list"]:
        for fault in FAULTS:
            print(f"{fault.name:28} {fault.harm}; {fault.killed_by}")
        return 0
    if words == ["check"]:
        wrong = [fault.name for fault in FAULTS if len(places(fault)) != 1]
        print(f"{len(FAULTS)} faults, {len(wrong)} that do not fit", *wrong)
        return int(bool(wrong))
    if words[:1] == ["diff"] and len(words) == 2 and words[1] in by_name:
        file, text = changed(by_name[words[1]])
        name = file.relative_to(ROOT)
        lines = file.read_text().splitlines(keepends=True), text.splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
