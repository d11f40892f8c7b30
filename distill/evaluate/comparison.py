"""Results of an evaluation: means over prompts with their intervals, paired differences, and tables of them.

``values`` are those of ``evaluation.json``: by participant and measure, for each prompt a list with a number per seed,
or with one number for all seeds together. A missing number is ``None`` or NaN, and its prompt is left out of the mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distill.evaluate.intervals import mean_interval, share_interval
from distill.evaluate.measures import MEASURES, SHARES

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
    lines = [f"| measure | {' | '.join(results)} |", "|---" * (len(results) + 1) + "|"]
    for row in rows_of_table(results):
        cells = [cell["value"] + f" ({cell['difference']})" * bool(cell["difference"]) for cell in row["cells"]]
        lines.append(f"| {row['measure']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two contents of ``evaluation.json``: ``protocol``, the locked settings that differ, and without any,
    ``participants``: for each pair of ``ours`` and ``theirs``, teachers with teachers, facts and paired differences."""
    found: dict[str, Any] = {"protocol": differing(ours["protocol"], theirs["protocol"]), "participants": []}
    if found["protocol"]:
        return found
    for name, facts in ours["participants"].items():
        for other, other_facts in theirs["participants"].items():
            if facts["role"] != other_facts["role"]:
                continue
            results = summarize({"there": theirs["values"][other], "here": ours["values"][name]}, "there")["here"]
            pair = {
                "here": name,
                "there": other,
                "facts": differing(facts, other_facts) + differing(_made(ours), _made(theirs)),
                "differences": {key: x["difference"] for key, x in results.items() if "difference" in x},
            }
            found["participants"].append(pair)
    return found


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
    return lines
