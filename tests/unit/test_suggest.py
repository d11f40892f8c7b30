"""``plan=suggest``: its candidates and its choice, against all possible settings."""

import itertools
import random

import pytest

from distill.config import compose_config
from distill.planning.suggest import Axes, Outcome, ranked, search

MODES = ("none", "selective", "full")
CHECKPOINTING = tuple(
    (f"student.activation_checkpointing={how}", f"fake.activation_checkpointing={how}") for how in MODES
)
MICRO_BATCHES = (("micro_batch_size=2",), ("micro_batch_size=4",))
GATHERED = tuple(f"{name}.strategy=optim_grads" for name in ("teacher", "student", "fake"))
OFFLOADED = ("student.offload=cpu", "fake.offload=cpu")


def axes(**changes):
    found = {
        "cp": (1, 2, 4, 8), "mesh": True, "checkpointing": CHECKPOINTING, "crowded": (), "gathered": GATHERED,
        "micro_batches": MICRO_BATCHES, "offloaded": OFFLOADED,
    }  # fmt: skip
    return Axes(**{**found, **changes})


def world(seed):
    """Return plans with random costs. More checkpointing and more ranks per sample use less memory and more time."""
    draws = random.Random(seed)
    states, activations, seconds = draws.uniform(20, 400), draws.uniform(20, 900), draws.uniform(1, 9)
    held, slower, offloaded = (1.0, draws.uniform(0.3, 0.7), draws.uniform(0.02, 0.2)), (1.0, 1.2, 1.33), 0.3

    def evaluate(candidates):
        outcomes = []
        for words in candidates:
            settings = dict(word.split("=") for word in words)
            cp = int(settings["mesh.cp"])
            how = MODES.index(settings.get("student.activation_checkpointing", "none"))
            size = states * (offloaded if "student.offload" in settings else 1)
            size += activations * held[how] / cp * int(settings.get("micro_batch_size", 1))
            outcomes.append(
                Outcome(words=words, device_gib=size, memory_gib=95.6, seconds_per_step=seconds * slower[how] * cp**0.2)
            )
        return outcomes

    return evaluate


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_mesh_and_checkpointing_is_found(seed):
    evaluate, varied = world(seed), axes(micro_batches=(), gathered=())
    every = evaluate([(*varied.split(cp), *how) for cp, how in itertools.product(varied.cp, CHECKPOINTING)])
    best, found = ranked(every)[0], ranked(search(varied, evaluate))
    if best.fits:
        assert found[0].words == best.words
    else:
        assert any("student.offload=cpu" in outcome.words for outcome in found), "the host's memory is tried"
    assert len(found) == len({outcome.words for outcome in found}) <= len(every) + 2, "nothing is planned twice"


def test_what_the_words_set_stays():
    words = ["experiment=wan2_1_t2v_14b_dmd2", "world=8"]
    config = compose_config([*words, "plan=suggest"])
    free = Axes.from_config(config, words)
    assert free == axes()
    for word, axis, left in (
        ("mesh.cp=8", "cp", (8,)),
        ("fake.activation_checkpointing=full", "checkpointing", ((),)),
        ("micro_batch_size=1", "micro_batches", ()),
        ("teacher.strategy=no_shard", "gathered", ()),
        ("student.offload=none", "offloaded", ()),
    ):
        given = [*words, word]
        assert getattr(Axes.from_config(compose_config([*given, "plan=suggest"]), given), axis) == left
    fixed = Axes.from_config(compose_config([*words, "mesh.cp=8", "plan=suggest"]), [*words, "mesh.cp=8"])
    assert not any(word.startswith("mesh.") for outcome in search(fixed, _all_fit) for word in outcome.words)


def test_one_sample_a_forward_comes_before_the_hosts_memory():
    """Eight samples a forward are the default here, and nothing fits until the search tries one."""
    words = ["experiment=quickstart", "world=2", "batch_size=16"]
    varied = Axes.from_config(compose_config([*words, "plan=suggest"]), words)
    assert varied.cp == (1, 2) and varied.crowded == (1, 2)

    def evaluate(candidates):
        return [
            Outcome(words=each, device_gib=1 if "micro_batch_size=1" in each else 99, memory_gib=9)
            for each in candidates
        ]

    found = search(varied, evaluate)
    assert {outcome.words[-1] for outcome in found if outcome.fits} == {"micro_batch_size=1"}
    assert not any("offload" in word for outcome in found for word in outcome.words)
    given = [*words, "micro_batch_size=8"]
    assert Axes.from_config(compose_config([*given, "plan=suggest"]), given).crowded == ()


def _all_fit(candidates):
    return [Outcome(words=words, device_gib=1, memory_gib=9, seconds_per_step=1) for words in candidates]
