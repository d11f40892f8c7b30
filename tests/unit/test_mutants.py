"""The known faults stay current: each fits the product once, and its killing test exists."""

import re

from tests.mutants.__main__ import ROOT, changed
from tests.mutants.faults import FAULTS


def test_each_fault_fits_in_one_place_and_names_a_test():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        file, text = changed(fault)
        compile(text, str(file), "exec")
        test_file, name = re.fullmatch(r"(.*?\.py)::(\w+)(\[.*\])?", fault.killed_by).group(1, 2)
        assert f"def {name}(" in (ROOT / "tests" / test_file).read_text(), fault.name
