"""Results of an evaluation: means over prompts with their intervals, paired differences, and tables of them.

``values`` are those of ``evaluation.json``: by participant and measure, for each prompt a list with a number per seed,
or with one number for all seeds together. A missing number is ``None`` or NaN, and its prompt is left out of the mean.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from distill.data.base import IMAGES
from distill.evaluate.intervals import mean_interval, share_interval
from distill.evaluate.measures import MEASURES, SHARES, TO_REFERENCE
from fsdp_cp.errors import UserError

RESULT = "evaluation.json"
SIZES = ("negative_prompt", "num_frames", "height", "width", "fps")
"""Settings of the data that the protocol fixes."""
FEW_PROMPTS = 32
_LEAST_PROMPTS = 8
_FEW_EVENTS = 10

Values = Mapping[str, Mapping[str, Sequence[Sequence[float | None]]]]
Result = dict[str, Any]


def summarize(values: Values, reference: str | None) -> dict[str, dict[str, Result]]:
    """Return the results by participant and measure: ``value``, ``low`` and ``high`` (95 %) and ``standard_error`` of
    the mean over ``prompts``; ``unsure`` for a share with fewer than 10 clips on one side; ``difference`` from
    ``reference``, paired by prompt, if both have the measure."""
    results: dict[str, dict[str, Result]] = {}
    for name, measures in values.items():
        results[name] = {}
        for key in (key for key in MEASURES if key in measures):
            seeds = [len(of_prompt) for of_prompt in measures[key]]
            result = mean_over_prompts(_means(measures[key]), seeds if key in SHARES else None)
            if key in SHARES:
                result["unsure"] = _is_unsure(measures[key])
            if reference not in (None, name) and key in values[reference]:
                other = values[reference][key]
                result["difference"] = mean_over_prompts(_means(measures[key]) - _means(other))
                if key in SHARES:
                    result["difference"]["unsure"] = result["unsure"] or _is_unsure(other)
            results[name][key] = result
    return results


def _means(numbers: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array([np.array(of_prompt, dtype=float).mean() for of_prompt in numbers])


def _is_unsure(shares: Sequence[Sequence[float | None]]) -> bool:
    """Return whether fewer than 10 clips have the property, or lack it."""
    clips = [float(clip or 0) for of_prompt in shares for clip in of_prompt]
    return min(sum(clips), len(clips) - sum(clips)) < _FEW_EVENTS


def mean_over_prompts(means: np.ndarray, clips: Sequence[int] | None = None) -> Result:
    """Return the mean of one number per prompt with its interval; without bounds for fewer than 8 prompts. A share
    of clips, 0 to 1, needs the number of ``clips`` of each prompt."""
    is_there = np.isfinite(means)
    means, prompts = means[is_there], int(is_there.sum())
    if prompts < _LEAST_PROMPTS:
        value = float(means.mean()) if prompts else None
        return {"value": value, "low": None, "high": None, "standard_error": None, "prompts": prompts}
    if clips is None:
        interval = mean_interval(means)
    else:
        interval = share_interval(means, int(np.array(clips)[is_there].sum()))
    return {key: float(x) for key, x in interval.items()} | {"prompts": prompts}


def verdict(difference: Result) -> str:
    """Return ``higher``, ``lower``, ``unsure`` or ``no difference shown`` for an interval of a difference."""
    if difference["low"] is None or difference.get("unsure"):
        return "unsure"
    return "higher" if difference["low"] > 0 else "lower" if difference["high"] < 0 else "no difference shown"


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)]


def in_words(result: Result | None) -> str:
    if result is None or result["value"] is None:
        return ""
    bounds = "" if result["low"] is None else f" [{result['low']:.4g}, {result['high']:.4g}]"
    return f"{result['value']:.4g}{bounds}{' (unsure)' if result.get('unsure') else ''}"


def rows_of_table(results: Mapping[str, Mapping[str, Result]]) -> list[dict[str, Any]]:
    """Return a row per measure: its name and meaning, and a cell per participant."""
    rows = []
    for key in (key for key in MEASURES if any(key in measures for measures in results.values())):
        cells = []
        for measures in results.values():
            result = measures.get(key)
            difference = result and result.get("difference")
            against = f"{in_words(difference)}: {verdict(difference)}" if difference else ""
            cells.append({"value": in_words(result), "difference": against})
        rows.append({"measure": key, "meaning": MEASURES[key], "cells": cells})
    return rows


def markdown(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the table as Markdown. The difference from the teacher stands in parentheses."""
    rows = []
    for row in rows_of_table(results):
        cells = [cell["value"] + f" ({cell['difference']})" * bool(cell["difference"]) for cell in row["cells"]]
        rows.append([row["measure"], *cells])
    return "\n".join(table_lines(["measure", *results], rows))


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def read_evaluation(path: Path) -> dict[str, Any]:
    """Return the content of another ``evaluation.json``, which ``--like`` names, if all that is read of it is there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if _is_whole(content):
            return content
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"--like {path} cannot be read ({error}); give the {RESULT} of an evaluation") from error
    raise UserError(f"--like {path} is not the whole {RESULT} of an evaluation; give one")


def _is_whole(content: Mapping[str, Any]) -> bool:
    """Return whether an evaluation can be repeated and compared; raise where it cannot even be read."""
    protocol, prompts, participants = content["protocol"], content["prompts"], content["participants"]
    images = (content.get("images") or [])[:: len(IMAGES.get(protocol.get("image"), "1"))]
    by_prompt = [prompts, content.get("captions") or prompts, images or prompts]
    for name in participants:
        by_prompt += map(_means, content["values"][name].values())
    if len(set(map(len, by_prompt))) > 1 or not prompts:
        return False
    roles = {facts["role"] for facts in participants.values()}
    has_seeds = content.get("suite") or protocol["seeds"] > 0
    return bool(has_seeds and roles and content["made"].keys() and {"precision", *SIZES} <= protocol.keys())


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two contents of ``evaluation.json``.

    Return ``protocol``, the locked settings that differ, ``reference``, the facts in which the references differ, and
    unless the protocol differs, ``participants``: for each pair of ``ours`` and ``theirs``, teachers with teachers, the
    facts that differ, the paired ``differences``, and ``left_out``, the measures to references that differ.
    """
    known = ours["protocol"].keys() & theirs["protocol"].keys()  # earlier versions wrote fewer facts
    protocol = differing(*({key: side["protocol"][key] for key in sorted(known)} for side in (ours, theirs)))
    reference = differing(_reference(ours), _reference(theirs))
    if protocol:
        return {"protocol": protocol, "reference": reference, "participants": []}
    left_out = TO_REFERENCE if reference else ()
    pairs = []
    for name, facts in ours["participants"].items():
        for other, other_facts in theirs["participants"].items():
            if facts["role"] != other_facts["role"]:
                continue
            results = summarize({"there": theirs["values"][other], "here": ours["values"][name]}, "there")["here"]
            differences = {key: result["difference"] for key, result in results.items() if "difference" in result}
            pair = {
                "here": name,
                "there": other,
                "facts": differing(facts, other_facts) + differing(_made(ours), _made(theirs)),
                "differences": {key: x for key, x in differences.items() if key not in left_out},
                "left_out": [key for key in differences if key in left_out],
            }
            pairs.append(pair)
    return {"protocol": protocol, "reference": reference, "participants": pairs}


def _reference(evaluation: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of the network from which an evaluation measures distances: its first teacher."""
    return next((facts for facts in evaluation["participants"].values() if facts["role"] == "teacher"), {})


def _made(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: evaluation["made"].get(key) for key in ("versions", "commit", "device")}


def comparison_lines(found: Mapping[str, Any], where: str) -> list[str]:
    if found["protocol"]:
        return [f"no verdict against {where}: another {', '.join(found['protocol'])}"]
    lines = []
    for pair in found["participants"]:
        differ = f" (differ in {', '.join(pair['facts'])})" if pair["facts"] else ""
        lines.append(f"{pair['here']}, against {pair['there']} of {where}{differ}:")
        lines += [f"  {key}: {in_words(x)}: {verdict(x)}" for key, x in pair["differences"].items()]
        if pair["left_out"]:
            differ = f"the references differ in {', '.join(found['reference'])}"
            lines.append(f"  {', '.join(pair['left_out'])}: no verdict, since {differ}")
    return lines
