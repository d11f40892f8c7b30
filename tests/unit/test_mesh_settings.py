"""resolve_mesh: valid sizes, and the values that it fills in."""

import itertools
import math

import pytest

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import resolve_mesh
from tests.unit.refused import refused

DEFAULTS = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "ulysses": "auto", "ring": "auto", "heads": None}


def settings(**changes):
    return {"world_size": 1, **DEFAULTS, **changes}


BAD = [  # settings, which of them the message must name
    ({"world_size": 4, "cp": -1}, "mesh.cp"),
    ({"dp_replicate": 0}, "mesh.dp_replicate"),
    ({"world_size": 4, "dp_shard": -2}, "mesh.dp_shard"),
    ({"world_size": 8, "dp_replicate": 2, "cp": 3}, "mesh.cp"),  # cp=8 leaves no room for two replicas
    ({"world_size": 8, "dp_replicate": 3}, "mesh.dp_replicate"),  # no value of cp would help
    ({"world_size": 8, "dp_shard": 2, "cp": 3, "heads": 12}, "mesh.dp_shard"),  # dp_shard=-1 does not help
    ({"world_size": 4, "dp_replicate": 4}, "mesh.dp_replicate"),
    ({"world_size": 4, "cp": 4, "ulysses": "all", "heads": 4}, "mesh.ulysses"),
    ({"world_size": 4, "cp": 4, "ulysses": 4, "heads": 2}, "mesh.ulysses"),
    ({"world_size": 4, "cp": 4, "ring": 2, "heads": 5}, "mesh.ring"),
    ({"world_size": 8, "cp": 8, "ring": 1, "ulysses": 8, "heads": 5}, "mesh.ulysses"),  # two settings must change
    ({"world_size": 2, "cp": 1, "ring": 2, "heads": 4}, "mesh.ring"),
]


@pytest.mark.parametrize(("given", "named"), BAD, ids=lambda value: str(value))
def test_misfits_are_refused_in_one_line_that_names_the_setting(given, named):
    with refused(named):
        resolve_mesh(**settings(**given))


def test_every_combination_fits_exactly_or_is_refused():
    grid = itertools.product(
        (1, 2, 3, 4, 8), (1, 2, 3), (-1, 1, 2, 4), (1, 2, 3, 4, 8), ("auto", 1, 2, 4), ("auto", 1, 2), (None, 1, 4, 12)
    )
    fitted = 0
    for world, replicate, shard, cp, ulysses, ring, heads in grid:
        given = {"dp_replicate": replicate, "dp_shard": shard, "cp": cp, "ulysses": ulysses, "ring": ring}
        try:
            shape = resolve_mesh(world_size=world, heads=heads, **given)
        except UserError as error:
            assert "mesh." in str(error) and "\n" not in str(error)
            # Every factorization of cp that fits must be accepted.
            degrees = [(cp // u, u) for u in range(1, cp + 1) if cp % u == 0 and (heads is None or heads % u == 0)]
            degrees = [(r, u) for r, u in degrees if ulysses in ("auto", u) and ring in ("auto", r)]
            sizes = replicate * cp * (1 if shard == -1 else shard)
            exact = sizes == world or (shard == -1 and world % sizes == 0)
            assert not (degrees and exact and (replicate == 1 or replicate < world)), (world, given, heads, str(error))
            continue
        fitted += 1
        assert shape.dp_replicate * shape.dp_shard * shape.ring * shape.ulysses == world
        assert (shape.dp_replicate, shape.cp) == (replicate, cp)
        assert shard in (-1, shape.dp_shard) and ulysses in ("auto", shape.ulysses) and ring in ("auto", shape.ring)
        assert heads is None or heads % shape.ulysses == 0
        if ulysses == ring == "auto":
            assert shape.ulysses == (math.gcd(heads, cp) if heads else cp)
    assert fitted > 300


def test_replicas_alone_are_for_networks_that_are_not_sharded():
    shape = resolve_mesh(**settings(world_size=4, dp_replicate=4, sharded=False))
    assert (shape.dp_replicate, shape.dp_shard, shape.cp, shape.dp) == (4, 1, 1, 4)
    with refused("mesh.dp_replicate"):
        resolve_mesh(**settings(world_size=4, dp_replicate=3, sharded=False))
