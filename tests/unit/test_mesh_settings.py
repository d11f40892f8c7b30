"""resolve_mesh: which sizes fit, what is filled in, and whether the errors' advice is any good."""

import itertools
import math
import re

import pytest

from fsdp_cp.errors import UserError
from fsdp_cp.mesh import resolve_mesh

DEFAULTS = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "ulysses": "auto", "ring": "auto", "heads": None}


def settings(**changes):
    return {"world_size": 1, **DEFAULTS, **changes}


@pytest.mark.parametrize(
    ("given", "sizes"),  # sizes: dp_replicate, dp_shard, ring, ulysses
    [
        ({}, (1, 1, 1, 1)),
        ({"world_size": 8}, (1, 8, 1, 1)),
        ({"world_size": 8, "cp": 2, "heads": 12}, (1, 4, 1, 2)),
        ({"world_size": 8, "cp": 8, "heads": 40}, (1, 1, 1, 8)),
        ({"world_size": 8, "cp": 4}, (1, 2, 1, 4)),
        ({"world_size": 8, "dp_shard": 2, "cp": 4, "ulysses": 4, "heads": 12}, (1, 2, 1, 4)),
        ({"world_size": 8, "cp": 4, "ring": 1, "heads": 12}, (1, 2, 1, 4)),
        ({"world_size": 8, "cp": 4, "ring": 1, "ulysses": 4, "heads": 4}, (1, 2, 1, 4)),
        ({"world_size": 8, "dp_replicate": 2}, (2, 4, 1, 1)),
        ({"world_size": 8, "dp_replicate": 2, "cp": 2, "heads": 4}, (2, 2, 1, 2)),
        ({"world_size": 4, "dp_replicate": 2, "cp": 2, "heads": 4}, (2, 1, 1, 2)),
        ({"world_size": 6, "cp": 3, "heads": 12}, (1, 2, 1, 3)),
        # What the heads do not divide goes to the ring.
        ({"world_size": 8, "cp": 8, "heads": 12}, (1, 1, 2, 4)),
        ({"world_size": 4, "cp": 4, "heads": 5}, (1, 1, 4, 1)),
        ({"world_size": 16, "cp": 16, "heads": 40}, (1, 1, 2, 8)),
        ({"world_size": 16, "cp": 8, "heads": 12}, (1, 2, 2, 4)),
        ({"world_size": 6, "cp": 6, "heads": 4}, (1, 1, 3, 2)),
        # One is set and the other follows, or both are set.
        ({"world_size": 8, "cp": 8, "ulysses": 2, "heads": 12}, (1, 1, 4, 2)),
        ({"world_size": 8, "cp": 4, "ulysses": 1, "heads": 12}, (1, 2, 4, 1)),
        ({"world_size": 8, "cp": 8, "ring": 4, "heads": 12}, (1, 1, 4, 2)),
        ({"world_size": 4, "cp": 4, "ring": 4, "heads": 5}, (1, 1, 4, 1)),
        ({"world_size": 4, "cp": 4, "ring": 2}, (1, 1, 2, 2)),
        ({"world_size": 8, "dp_replicate": 2, "cp": 4, "ring": 2, "ulysses": 2, "heads": 6}, (2, 1, 2, 2)),
    ],
)
def test_shapes_that_fit(given, sizes):
    shape = resolve_mesh(**settings(**given))
    assert (shape.dp_replicate, shape.dp_shard, shape.ring, shape.ulysses) == sizes
    assert shape.dp == sizes[0] * sizes[1]
    assert shape.cp == sizes[2] * sizes[3]


def test_shape_names_every_axis_in_the_log():
    shape = resolve_mesh(**settings(world_size=24, dp_replicate=2, cp=6, heads=4))
    assert str(shape) == "dp_replicate=2 x dp_shard=2 x cp=6 (ring=3 x ulysses=2)"


BAD = [  # what is given, which setting the message must name
    ({"cp": 0}, "mesh.cp=0"),
    ({"world_size": 4, "cp": -1}, "mesh.cp=-1"),
    ({"dp_replicate": 0}, "mesh.dp_replicate=0"),
    ({"dp_shard": 0}, "mesh.dp_shard=0"),
    ({"world_size": 4, "dp_shard": -2}, "mesh.dp_shard=-2"),
    ({"world_size": 8, "cp": 3}, "mesh.cp=3"),
    ({"world_size": 8, "cp": 3, "heads": 12}, "mesh.cp=3"),
    ({"world_size": 2, "cp": 4, "heads": 12}, "mesh.cp=4"),
    ({"world_size": 8, "dp_replicate": 2, "cp": 3}, "mesh.cp=3"),  # cp=8 leaves no room for two replicas
    ({"world_size": 8, "dp_replicate": 3}, "mesh.dp_replicate=3"),  # no cp at all would help
    ({"world_size": 8, "dp_shard": 2}, "mesh.dp_shard=2"),
    ({"world_size": 2, "dp_shard": 4}, "mesh.dp_shard=4"),
    ({"world_size": 8, "dp_shard": 2, "cp": 2, "heads": 4}, "mesh.dp_shard=2"),
    ({"world_size": 8, "dp_shard": 2, "cp": 3, "heads": 12}, "mesh.dp_shard=2"),  # dp_shard=-1 does not help
    ({"world_size": 4, "dp_replicate": 4}, "mesh.dp_replicate=4"),
    ({"world_size": 8, "dp_replicate": 8, "dp_shard": 1}, "mesh.dp_replicate=8"),
    ({"world_size": 8, "cp": 8, "ulysses": 8, "heads": 12}, "mesh.ulysses=8"),
    ({"world_size": 4, "cp": 4, "ulysses": 3, "heads": 4}, "mesh.ulysses=3"),
    ({"world_size": 4, "cp": 4, "ulysses": 0, "heads": 4}, "mesh.ulysses=0"),
    ({"world_size": 4, "cp": 4, "ulysses": "all", "heads": 4}, "mesh.ulysses=all"),
    ({"world_size": 4, "cp": 4, "ulysses": 4, "heads": 2}, "mesh.ulysses=4"),
    ({"world_size": 4, "cp": 4, "ring": 0, "heads": 4}, "mesh.ring=0"),
    ({"world_size": 4, "cp": 4, "ring": 3, "heads": 4}, "mesh.ring=3"),
    ({"world_size": 4, "cp": 4, "ring": 2, "ulysses": 4, "heads": 4}, "mesh.ring=2"),
    ({"world_size": 8, "cp": 8, "ring": 2, "ulysses": 2, "heads": 12}, "mesh.ring=2"),
    ({"world_size": 4, "cp": 4, "ring": 2, "heads": 5}, "mesh.ring=2"),
    ({"world_size": 8, "cp": 8, "ring": 1, "heads": 12}, "mesh.ring=1"),
    ({"world_size": 8, "cp": 8, "ring": 1, "ulysses": 8, "heads": 5}, "mesh.ulysses=8"),  # two settings must change
    ({"world_size": 2, "cp": 1, "ulysses": 2, "heads": 4}, "mesh.ulysses=2"),
    ({"world_size": 2, "cp": 1, "ring": 2, "heads": 4}, "mesh.ring=2"),
]
IDS = [" ".join(f"{k}={v}" for k, v in given.items()) for given, _ in BAD]


def refusal(given) -> str:
    with pytest.raises(UserError) as caught:
        resolve_mesh(**settings(**given))
    return str(caught.value)


@pytest.mark.parametrize(("given", "named"), BAD, ids=IDS)
def test_misfits_are_refused_in_one_line_that_names_the_setting(given, named):
    message = refusal(given)
    assert "\n" not in message
    assert re.search(re.escape(named) + r"(?![\w.])", message), message


def advice(message: str) -> list[dict]:
    """What a message tells the user to do, as changes of settings."""

    def value(text):
        return text if text == "auto" else int(text)

    head, _, tail = message.partition("; ")
    subject = re.match(r"mesh\.(\w+)=", head).group(1)
    if "set one of them to auto" in tail:
        return [{name: "auto"} for name in re.findall(r"mesh\.(ring|ulysses)=", head)]
    if not tail:  # "mesh.cp=0 must be at least 1", "... at least 1, or -1 for what is left", "... must be auto or ..."
        always = re.search(r" (auto) or|, or (-1)|at least (\d+)$", head)
        return [{subject: value(next(filter(None, always.groups())))}]
    found = []
    for part in re.split(r",? or (?=start|use|mesh\.)|, (?=mesh\.)", tail):
        if processes := re.search(r"start (\d+) processes", part):
            found.append({"world_size": int(processes.group(1))})
        elif changes := re.findall(r"mesh\.(\w+)=(auto|-?\d+)", part):
            found.append({name: value(v) for name, v in changes})
        else:
            among = re.search(r"mesh\.(\w+) among", part)
            name = among.group(1) if among else subject
            found += [{name: value(v)} for v in re.findall(r"-?\b\d+\b|\bauto\b", part)]
    return found


@pytest.mark.parametrize(("given", "named"), BAD, ids=IDS)
def test_everything_that_an_error_suggests_works(given, named):
    message = refusal(given)
    suggested = advice(message)
    assert suggested, f"no advice in: {message}"
    for change in suggested:
        try:
            resolve_mesh(**settings(**(given | change)))
        except UserError as error:
            pytest.fail(f"{given} says {message!r}, but with {change}: {error}")


def test_the_advice_lists_every_degree_that_fits():
    message = refusal({"world_size": 8, "cp": 8, "ulysses": 8, "heads": 12})
    assert message == "mesh.ulysses=8 does not divide 12 heads; use a mesh.ulysses among auto, 1, 2, 4"


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
            # Nothing that fits may be refused: try every factorisation of cp.
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
    given = {"world_size": 4, "dp_replicate": 4}
    message = refusal(given)
    assert "nothing to shard over" in message and "strategy=no_shard on every role; use mesh.dp_replicate=1" in message
    shape = resolve_mesh(**settings(**given, sharded=False))
    assert (shape.dp_replicate, shape.dp_shard, shape.cp, shape.dp) == (4, 1, 1, 4)
    with pytest.raises(UserError, match=r"mesh\.dp_replicate=3 x mesh\.cp=1 does not divide the world of 4 ranks"):
        resolve_mesh(**settings(world_size=4, dp_replicate=3, sharded=False))
