"""What was stored is held to a table: each field's name and the rule that its value keeps.

A rule is called with a name and a value and raises Unfit for the first thing that does not fit. `record` makes a rule
out of a table; it looks at the whole of a value, so that nothing is allocated or counted through before.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[[str, Any], None]
MOST = 2**63 - 1  # of a whole number


class Unfit(ValueError):
    """`NAME is VALUE, but must be WHAT`, in one short line."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        shown = type(value).__name__
        if isinstance(value, (str, bytes)):
            shown = repr(value[:40])
        elif value is None or (isinstance(value, (int, float)) and not abs(value) >= 1e40):  # nan too
            shown = repr(value)
        super().__init__(f"{name} is {shown}, but must be {expected}")


def whole(low: int = 0, high: int = MOST) -> Rule:
    """A whole number from `low` to `high`; True is none."""

    def rule(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            limit = f"of at least {low:,}" if high == MOST else f"from {low:,} to {high:,}"
            raise Unfit(name, value, f"a whole number {limit}")

    return rule


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Rule:
    """A number from `low` to `high`."""

    def rule(name: str, value: Any) -> None:
        known = type(value) in (int, float) and (not finite or math.isfinite(value))
        if not known or (math.isfinite(value) and not low <= value <= high):
            raise Unfit(name, value, f"a number from {low:g} to {high:g}" if low > -math.inf else "a finite number")

    return rule


def text(name: str, value: Any) -> None:
    """Any text."""
    if not isinstance(value, str):
        raise Unfit(name, value, "text")


def truth(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise Unfit(name, value, "true or false")


def one_of(*values: Any) -> Rule:
    """One of `values`."""

    def rule(name: str, value: Any) -> None:
        if not any(type(value) is type(known) and value == known for known in values):
            raise Unfit(name, value, "one of " + ", ".join(map(repr, values)))

    return rule


def maybe(inner: Rule) -> Rule:
    """None, or what `inner` allows."""
    return lambda name, value: None if value is None else inner(name, value)


def items(inner: Rule, least: int = 0, most: int = MOST) -> Rule:
    """A list (or tuple) of `least` to `most` items that keep `inner`."""

    def rule(name: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)):
            raise Unfit(name, value, "a list")
        if not least <= len(value) <= most:
            raise Unfit(f"the length of {name}", len(value), f"from {least:,} to {most:,}")
        for place, item in enumerate(value):
            inner(f"{name}[{place}]", item)

    return rule


def mapping(inner: Rule) -> Rule:
    """A dict with keys of text, whatever they are, whose values keep `inner`."""

    def rule(name: str, value: Any) -> None:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise Unfit(name, value, "a mapping of names")
        for key, item in value.items():
            inner(f"{name}.{key}", item)

    return rule


def anything(name: str, value: Any) -> None:
    """No rule."""


def record(fields: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    """A dict with all of `fields`, perhaps some of the `optional` ones, and perhaps others that nobody reads."""

    def rule(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise Unfit(name, value, "a mapping of names")
        prefix = f"{name}." if name else ""
        for key, inner in fields.items():
            if key not in value:
                raise ValueError(f"{prefix}{key} is missing")
            inner(prefix + key, value[key])
        for key, inner in (optional or {}).items():
            if key in value:
                inner(prefix + key, value[key])

    return rule
