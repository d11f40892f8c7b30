"""LTX-2 and MiniMax-H3 on a mesh against the plain network: output, gradients, derivative and weights."""

import pytest

from models import verify
from models.families.registry import FAMILIES
from models.verify import write_example
from tests.tiers import long_case, slow


@slow
@pytest.mark.parametrize(("dp_shard", "cp"), [(2, 2), long_case(1, 3)])
@pytest.mark.parametrize(
    ("family", "grid", "optional"),
    [
        pytest.param("ltx2", verify.GRIDS[0], False, id="ltx2, 45 and 13 tokens"),
        pytest.param("ltx2", verify.GRIDS[1], False, id="ltx2, 16 and one, without gradients of queries and keys"),
        pytest.param("ltx2", verify.GRIDS[0], True, id="ltx2, a first frame"),
        pytest.param("minimax_h3", (2, 2, 4), False, id="minimax_h3, 51 rows"),
        pytest.param("minimax_h3", (1, 2, 13), False, id="minimax_h3, 53 rows"),
        pytest.param("minimax_h3", (2, 2, 4), True, id="minimax_h3, keyframes of 16 rows, texts of 1 and 4 rows"),
        pytest.param("minimax_h3", (3, 1, 1), True, id="minimax_h3, keyframes of 2 rows"),
        pytest.param("minimax_h3", (2, 2, 4), 2, id="minimax_h3, references of 1 and 0, 6 and 8 rows"),
    ],
)
def test_a_mesh_computes_the_plain_network(pools, tmp_path, family, grid, optional, dp_shard, cp):
    """Sound and video over ranks that do not divide them, with recomputation. A gradient that is 0 but for rounding, as
    with one token of sound, is compared with a millionth of all gradients' norm."""
    for i, config in enumerate(FAMILIES[family].examples().values()):
        folder = tmp_path / str(i)
        write_example(folder, family, config)
        truth = verify.plain_result(verify.planned(folder, family), grid, optional)
        case = verify.Case(
            folder=folder, family=family, dp_shard=dp_shard, cp=cp, grid=grid, checkpointing=True, optional=optional
        )
        (ours, changed), *_ = pools[dp_shard * cp].run(verify.rank_result, case, tmp_path / f"{i}_out")
        errors, _ = verify.compare(ours, truth, changed)
        assert max(errors.values()) < 1e-9, errors
