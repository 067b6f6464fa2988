"""Text for people: aligned columns, figures, lists and lines that are cut to fit, names that any
terminal can show.
"""

import difflib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

# controls
BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def columns(rows: Iterable[Sequence[str]], align: str = "<>") -> str:
    """Rows of equally many cells as aligned text that can be shown anywhere (`printable`), two
    spaces between the columns, nothing at a line's end.

    Args: `align` a character a column, `<` to the left and `>` to the right; the last one holds for
    all that follow.
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
    """A figure with the given digits after the point; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Seconds for a person: `90 s`, `12 min`, `3.5 h`, `4.2 days`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def shorten(text: str, most: float, length: Callable[[str], float] = len) -> str:
    """Text of at most so many characters (or whatever `length` measures), its middle left out where
    it is longer.
    """
    short, keep = text, len(text)
    while length(short) > most and keep > 1:
        keep -= 1
        short = f"{text[: (keep + 1) // 2]}…{text[len(text) - keep // 2 :]}"
    return short


def printable(text: str) -> str:
    r"""A name as it can be shown anywhere: control characters, separators of lines, controls of the
    writing direction and bytes that are no UTF-8 become \n, \x1b, \u2028, \xff.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a name that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in BIDIRECTIONAL:
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character


def set_names(classes: Sequence[str], sets: Iterable[Sequence[int]]) -> list[str]:
    """What sets of classes are called: the names, joined."""
    return ["; ".join(classes[label] for label in labels) or "(no label)" for labels in sets]


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: `1 image`, `2,000 images`, `3 classes`."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first names: `a, b, c and 17 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, str]) -> str:
    """Return `" (did you mean 'x'?)"` if a known name resembles `name`, else an empty string.

    `known`: the names; a mapping gives the text to print for each.
    """
    labels = known if isinstance(known, Mapping) else dict(zip(known, known, strict=True))
    near = difflib.get_close_matches(name, labels, n=1, cutoff=0.6)
    return f" (did you mean {labels[near[0]]!r}?)" if near else ""
