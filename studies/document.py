"""study.json: what a study found so far. It depends on the results alone, not on how often the study was stopped."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from studies.declare import Arm, Comparison, Conclusion, Result, Results, Subject
from studies.verdict import checked, compared, in_words

SCHEMA = 1
VOID = "void: a control came out wrong, so the figures below prove nothing"


def document(
    name: str,
    subject: Subject,
    arms: Sequence[Arm],
    there: Mapping[str, Mapping[int, Result]],  # by arm and seed
    whole: Sequence[int],  # seeds that all arms have
    *,
    planned: Sequence[int],
) -> dict[str, Any]:
    """`subject`, `title`, `complete`, `runs`, `seeds`, `arms`, `choices`, `comparisons`, `controls`, `void` (None while
    no seed is complete), `verdicts` (by arm and group), `words`, `tables`, `pictures`, `notes`.
    """
    done, wanted = sum(map(len, there.values())), len(arms) * len(planned)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "subject": name,
        "title": subject.title,
        "complete": done == wanted,
        "runs": {"done": done, "planned": wanted},
        "seeds": list(whole),
        "arms": [_row(arm, there[arm.name]) for arm in arms],
    }
    if not whole:
        nothing: dict[str, Any] = {
            "choices": {},
            "comparisons": [],
            "controls": [],
            "void": None,
            "verdicts": [],
            "tables": [],
        }
        return found | nothing | {"words": ["no seed is complete: there is nothing to compare"], "notes": []}
    results, conclusion = _concluded(subject, there, whole)
    comparisons, controls = compared(results, conclusion.comparisons), checked(results, subject.controls())
    asked = [row for row in comparisons if any(_is(row, comparison) for comparison in conclusion.asked)]
    failed = [row for row in controls if not row["ok"]]
    return found | {
        "choices": dict(conclusion.choices),
        "comparisons": comparisons,
        "controls": controls,
        "void": bool(failed),
        "verdicts": [{key: row[key] for key in ("first", "second", "group", "figure", "verdict")} for row in asked],
        "words": _words(asked, failed, done == wanted),
        "tables": [{"title": title, "header": list(head), "rows": rows} for title, head, rows in conclusion.tables],
        "pictures": [asdict(picture) for picture in conclusion.pictures],
        "notes": list(conclusion.notes),
    }


def _row(arm: Arm, results: Mapping[int, Result]) -> dict[str, Any]:
    """An arm, and its runs' figures by their seed."""
    figures = {str(seed): result.figures for seed, result in results.items()}
    return {"name": arm.name, "what": arm.what, "family": arm.family, "figures": figures}


def _concluded(
    subject: Subject, there: Mapping[str, Mapping[int, Result]], whole: Sequence[int]
) -> tuple[Results, Conclusion]:
    by_arm = {name: [results[seed] for seed in whole] for name, results in there.items()}
    results = Results(whole, by_arm, subject.labels(), subject.groups())
    return results, subject.conclude(results)


def _is(row: Mapping[str, Any], comparison: Comparison) -> bool:
    """Whether a row is an answer to the comparison."""
    same = (row["first"], row["second"], row["figure"], row["family"])
    return same == (comparison.first, comparison.second, comparison.figure, comparison.family)


def _words(asked: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]], complete: bool) -> list[str]:
    """The verdict for people, a sentence for each answer."""
    lines = [] if complete else ["unfinished: the answers are of the seeds that are done"]
    if failed:
        lines.append(VOID)
        lines += [f"{row['arm']} against {row['against']}: {row['found']}, not: {row['expected']}" for row in failed]
    return lines + [in_words(row) for row in asked]
