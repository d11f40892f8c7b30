"""An interrupted ``plan=suggest`` resumes with the candidates that it has planned."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from distill.planning.suggest import SUGGESTIONS, Outcome, Record, plan_all

ABOUT = {"words": ["world=8"], "settings": "0123"}
CANDIDATES = [(f"mesh.cp={n}",) for n in (1, 2, 4)]


def outcome(words):
    return Outcome(words=words, device_gib=10.0, memory_gib=96.0, seconds_per_step=2.0, mesh="cp")


def test_what_was_planned_is_not_planned_again(tmp_path):
    planned = []

    def recorded():
        file = tmp_path / SUGGESTIONS
        return json.loads(file.read_text())["candidates"] if file.exists() else []

    def plan(words):
        planned.append(words)
        if len(planned) == 3:
            while len(recorded()) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt
        return outcome(words)

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        plan_all(CANDIDATES, plan, pool, Record(tmp_path, ABOUT))
    assert {tuple(each["words"]) for each in recorded()} == set(CANDIDATES[:2])
    with ThreadPoolExecutor(1) as pool:
        found = plan_all(CANDIDATES, plan, pool, Record(tmp_path, ABOUT))
    assert found == [outcome(words) for words in CANDIDATES]
    assert planned == [*CANDIDATES, CANDIDATES[2]]


@pytest.mark.parametrize("about", [ABOUT, ABOUT | {"settings": "4567"}])
def test_another_or_a_finished_search_is_not_resumed(tmp_path, about):
    record = Record(tmp_path, ABOUT)
    record.add(outcome(CANDIDATES[0]))
    assert bool(Record(tmp_path, about).outcomes) == (about == ABOUT)
    record.write([outcome(CANDIDATES[0])], finished=True)
    assert not Record(tmp_path, about).outcomes
