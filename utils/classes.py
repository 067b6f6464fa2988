"""Whether two lists of class names are the same: labels are numbers and mean the same only then."""

from collections.abc import Sequence

from duetgan.utils.errors import UserError
from duetgan.utils.text import listed


def require_same_classes(
    who: str, names: Sequence[str], other: str, others: Sequence[str], remedy: str = "give those of the same classes"
) -> None:
    """Raise UserError unless two lists of classes are the same, order included; it says what differs."""
    names, others = list(names), list(others)
    if names == others:
        return
    sides = ((others, names, "missing here"), (names, others, "only here"))
    odd = [(sorted(set(some) - set(rest)), where) for some, rest, where in sides]
    differences = [f"{listed(those)} {where}" for those, where in odd if those]
    if not differences:
        place = next(i for i, (name, theirs) in enumerate(zip(names, others, strict=False)) if name != theirs)
        differences = [f"class {place} is {names[place]!r} here and {others[place]!r} there"]
    raise UserError(f"{who}: its classes are not those of {other}: {'; '.join(differences)}; {remedy}")
