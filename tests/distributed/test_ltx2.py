"""LTX-2 on a mesh against the plain network: output, gradients, derivative and weights."""

import pytest

from models import verify
from models.families.ltx2 import LTX2
from models.verify import write_example

EXAMPLES = LTX2().examples()


@pytest.mark.slow
@pytest.mark.parametrize(("dp_shard", "cp"), [(1, 3), (2, 2)])
def test_a_mesh_computes_the_plain_network(pools, tmp_path, dp_shard, cp):
    """13 rows of sound and 45 tokens of video over ranks that do not divide them, with recomputation."""
    for i, example in enumerate(EXAMPLES):
        folder = tmp_path / str(i)
        write_example(folder, "ltx2", EXAMPLES[example])
        grid = verify.GRIDS[0]
        truth = verify.plain_result(verify.planned(folder, "ltx2"), grid)
        case = verify.Case(folder=folder, family="ltx2", dp_shard=dp_shard, cp=cp, grid=grid, checkpointing=True)
        (ours, changed), *_ = pools[dp_shard * cp].run(verify.rank_result, case, tmp_path / f"{i}_out")
        errors, _ = verify.compare(ours, truth, changed)
        assert max(errors.values()) < 1e-12, errors
