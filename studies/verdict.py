"""From results to answers: differences between arms, Holm's correction, controls, and study.json, what a study found so
far. It depends on the results alone, not on how often the study was stopped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from duetgan.metrics.comparison.paired import LEVEL, Difference, by_seeds, by_seeds_and_images, holm
from duetgan.reporting.figures import change
from duetgan.studies.subject import Comparison, Conclusion, Control, Result, Results, Subject

SCHEMA = 1
HELPS, HURTS, OPEN = "helps", "hurts", "cannot tell"
VOID = "void: a control came out wrong, so the figures below prove nothing"


def difference(results: Results, first: str, second: str, group: str, figure: str | None) -> Difference | None:
    """The second arm less the first; None where a figure is missing, or one seed cannot tell."""
    if figure is None:
        return by_seeds_and_images(results.hits(first), results.hits(second), results.weights(group))
    one, other = results.figures(first, figure), results.figures(second, figure)
    if None in (*one, *other):
        return None
    return by_seeds(one, other) if len(one) > 1 else Difference(other[0] - one[0], None, None, "one seed")


def answer(value: float, p: float | None, *, larger_is_better: bool = True) -> str:
    """`helps`, `hurts`, or `cannot tell`."""
    if p is None or p >= LEVEL:
        return OPEN
    return HELPS if (value > 0) == larger_is_better else HURTS


def compared(results: Results, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """An answer for each comparison: the comparison, both values, `difference`, its 95 % `interval`, `p` (corrected
    after Holm within the family), `method`, `verdict`.
    """
    rows: list[dict[str, Any]] = []
    for each in comparisons:
        arms, group, figure = (each.first, each.second), each.group, each.figure
        if found := difference(results, *arms, group, figure):
            values = [results.mean(arm, group) if figure is None else results.mean_figure(arm, figure) for arm in arms]
            both = {"first_value": values[0], "second_value": values[1]}
            rows.append(asdict(each) | both | asdict(found))
    for family in dict.fromkeys(row["family"] for row in rows):
        holm(row for row in rows if row["family"] == family)
    for row in rows:
        row["verdict"] = answer(row["difference"], row["p"], larger_is_better=row["larger_is_better"])
    return rows


def checked(results: Results, controls: Sequence[Control]) -> list[dict[str, Any]]:
    """The controls and how they came out: the declaration, `difference`, `interval`, `p` (of each alone), `found` and
    `ok`. A control that could not be computed has failed.
    """
    rows = []
    for control in controls:
        found = difference(results, control.against, control.arm, control.group, control.figure)
        row = asdict(control) | {"difference": None, "interval": None, "p": None, "found": OPEN, "ok": False}
        if found is not None:
            verdict = answer(found.difference, found.p, larger_is_better=control.larger_is_better)
            fine = {"helps": verdict == HELPS, "not helps": verdict != HELPS, "same": verdict == OPEN}
            row |= asdict(found) | {"found": verdict, "ok": fine[control.expected]}
        rows.append(row)
    return rows


def in_words(row: dict[str, Any]) -> str:
    scale, unit = (100, " points") if row["figure"] is None else (1, "")
    ends = [change(scale * end) for end in row["interval"] or []]
    sure = f", 95 % interval {' to '.join(ends)}" if ends else ""
    what = f"{row['group']} classes" if row["figure"] is None else row["figure"]
    p = "not known" if row["p"] is None else "below 0.0001" if row["p"] < 1e-4 else f"{row['p']:.2g}"
    size = f"{change(scale * row['difference'])}{unit}{sure}, p {p}"
    return f"{what}: {row['verdict']} ({row['second']} against {row['first']}: {size})"


def document(
    name: str,
    subject: Subject,
    results: Mapping[str, Mapping[int, Result]],  # by arm and seed
    planned: Sequence[int],  # seeds
) -> dict[str, Any]:
    """`subject`, `title`, `complete`, `runs`, `seeds`, `arms`, `choices`, `comparisons`, `controls`, `void` (None while
    no seed is complete), `verdicts` (by arm and group), `words`, `tables`, `pictures`, `notes`.
    """
    done, wanted = sum(map(len, results.values())), len(results) * len(planned)
    whole = [seed for seed in planned if all(seed in runs for runs in results.values())]
    conclusion, comparisons, controls = Conclusion(), [], []
    if whole:
        by_arm = {arm: [runs[seed] for seed in whole] for arm, runs in results.items()}
        table = Results(whole, by_arm, subject.labels(), subject.groups())
        conclusion = subject.conclude(table)
        comparisons, controls = compared(table, conclusion.comparisons), checked(table, subject.controls())
    asked = [row for row in comparisons if row["asked"]]
    failed = [row for row in controls if not row["ok"]]
    words = ["unfinished: the answers are of the seeds that are done"] * (done < wanted)
    words += [VOID] * bool(failed)
    words += [f"{row['arm']} against {row['against']}: {row['found']}, not: {row['expected']}" for row in failed]
    words += [in_words(row) for row in asked]
    return {
        "schema": SCHEMA,
        "subject": name,
        "title": subject.title,
        "complete": done == wanted,
        "runs": {"done": done, "planned": wanted},
        "seeds": whole,
        "arms": [
            {"name": arm.name, "what": arm.what, "family": arm.family}
            | {"figures": {str(seed): result.figures for seed, result in results[arm.name].items()}}
            for arm in subject.arms()
        ],
        "choices": dict(conclusion.choices),
        "comparisons": comparisons,
        "controls": controls,
        "void": bool(failed) if whole else None,
        "verdicts": [{key: row[key] for key in ("first", "second", "group", "figure", "verdict")} for row in asked],
        "words": words if whole else ["no seed is complete: there is nothing to compare"],
        "tables": [{"title": title, "header": list(head), "rows": rows} for title, head, rows in conclusion.tables],
        "pictures": [
            {"file": f"pictures/{subject.picture(picture).name}", "caption": caption}
            for picture, caption in conclusion.pictures.items()
            if subject.picture(picture).is_file()
        ],
        "notes": list(conclusion.notes),
    }
