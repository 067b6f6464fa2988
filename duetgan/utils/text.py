"""Format text for people: aligned columns, numbers, lists, shortened lines, printable names."""

import difflib
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

# control characters of the writing direction
BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def columns(rows: Iterable[Sequence[str]], align: str = "<>") -> str:
    """Format a table as text with aligned columns. All rows must have the same number of cells.

    Two spaces separate the columns; lines have no trailing spaces. Unprintable characters are
    escaped (see `printable`).

    Args:
        align: a character for each column, `<` for left and `>` for right; the last one applies to
            all remaining columns.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    align = align.ljust(len(widths), align[-1])
    return "\n".join(
        "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=False)
        ).rstrip()
        for row in table
    )


def decimal(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` decimal places, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def number(value: float) -> str:
    """Format a number briefly: `0.0123`, `4.57`, `1,234`, `20k`, `1.2e-05`.

    NaN and infinities become `not finite`.
    """
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 10_000 and value % 1000 == 0:
        return f"{value / 1000:,.0f}k"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 or value == 0 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """Return a duration for people: `90 s`, `12 min`, `3.5 h`, `4.2 days`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:,.1f} days"


def shorten(text: str, most: float, length: Callable[[str], float] = len) -> str:
    """Replace the middle of a text by `…` if `length(text)` is more than `most`."""
    short, keep = text, len(text)
    while length(short) > most and keep > 1:
        keep -= 1
        short = f"{text[: (keep + 1) // 2]}…{text[len(text) - keep // 2 :]}"
    return short


def printable(text: str) -> str:
    r"""Return a text with escapes for all characters that a terminal cannot show safely.

    These are control characters (escaped as \n or \x1b), line separators (\u2028), controls of the
    writing direction (\u202e), and bytes that are not UTF-8 (\xff).
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, in Python's surrogateescape
        return f"\\x{code - 0xDC00:02x}"
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDIRECTIONAL:
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character


def set_names(classes: Sequence[str], label_sets: Iterable[Sequence[int]]) -> list[str]:
    """Return a name for each label set: the names of its classes, joined by "; ".

    An empty set is called "(no label)".
    """
    return ["; ".join(classes[label] for label in labels) or "(no label)" for labels in label_sets]


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 image`, `2,000 images`, `3 classes`."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first `most` names as text: `a, b, c and 17 more`."""
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most:,} more"


def did_you_mean(name: str, names: Sequence[str] | Mapping[str, str]) -> str:
    """Return `" (did you mean 'x'?)"` if a known name resembles `name`, else an empty string.

    Args:
        names: the known names, or a mapping from each known name to the text to print for it.
    """
    texts = names if isinstance(names, Mapping) else dict(zip(names, names, strict=True))
    near = difflib.get_close_matches(name, texts, n=1, cutoff=0.6)
    return f" (did you mean {texts[near[0]]!r}?)" if near else ""
