"""Mutations of bytes, text and trees of values. All draws come from the `Random` that is given."""

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

INTEGERS = (0, 1, -1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, 2**63, 10**9, 10**30)
FLOATS = (0.0, -0.0, 1e-45, 1e308, -1.5, 0.5, math.nan, math.inf, -math.inf)
TEXTS = ("", " ", "0", "none", "../../x", "/dev/null", "a\nb", "a\0b", "\x1b[31m", "\u2029", "é", "e\u0301", "x" * 500)
ODD: tuple[Any, ...] = (*INTEGERS, *FLOATS, *TEXTS, None, True, False, [], {}, [[]], [None], {"": 0}, [0] * 100)
SCALARS = (  # of YAML, as text
    *("", "~", ".nan", ".inf", "-.inf", "true", "no", "0", "-1", "1", "0.5", "-0.5", "1e-30", "1e30", "1000000000"),
    *("1" * 5000, "0x10", "1_000", "12:30:45", "2020-01-01", "[]", "{}", "[1, 2]", "{a: 1}", "'text'", '"\\0"', "*x"),
    *("&x [1]", "!!python/object:os.system {}", "!!binary aGk=", "? a", "- a", "|\n  a", "auto", "resnet18", "猫"),
)


def mutated_bytes(draw: random.Random, content: bytes, most: int = 4) -> bytes:
    """One to `most` changes: bits, bytes, numbers, cuts, repetitions, insertions."""
    data = bytearray(content)
    for _ in range(draw.randint(1, most)):
        at = draw.randrange(len(data) + 1)
        length = min(len(data) - at, draw.choice((1, 2, 4, 8, 64, 1024)))
        match draw.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(data):
                data[at] = draw.choice((0, 1, 127, 128, 255))
            case 2:
                number = draw.choice(INTEGERS[:15])
                width, order = draw.choice((("H", 2), ("I", 4), ("Q", 8))), draw.choice("<>")
                data[at : at + width[1]] = struct.pack(order + width[0], number % 2 ** (8 * width[1]))
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                data[at:at] = draw.randbytes(length)
            case 6:
                data[at : at + length] = bytes(length)
            case 7 if draw.random() < 0.3:
                del data[at:]
    return bytes(data)


def mutated_text(draw: random.Random, text: str) -> str:
    """Lines that are dropped, repeated, indented or cut; characters that are replaced."""
    lines = text.splitlines() or [""]
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        line = lines[at]
        place = draw.randint(0, len(line))
        odd = draw.choice((*TEXTS, *"'\"{}[]:,#&*!|>%@`?-\t\r\0\ufeff\u2028"))
        indented, replaced = " " * draw.choice((1, 2, 4)) + line, line[:place] + odd + line[place + 1 :]
        lines[at : at + 1] = draw.choice(([], [line, line], [indented], [line[:place]], [replaced]))
        lines = lines or [""]
    return "\n".join(lines) + "\n"


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or indices."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places(tree[key])


def mutated_tree(draw: random.Random, tree: Any, odd: Callable[[Any], Any] | None = None) -> Any:
    """A copy of dicts and lists with one to three values replaced, dropped, repeated, or under other keys; `odd` makes
    another value of one.
    """
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return draw.choice(ODD)
        where, key = draw.choice(found if draw.random() < 0.5 else _under_one(draw, tree))
        match draw.randrange(8):
            case 0:
                del where[key]
            case 1 if isinstance(where, list):
                where.insert(key, where[key])
            case 1:
                where[draw.choice((*TEXTS, str(key) + "x"))] = where.pop(key)
            case 2:
                source, at = draw.choice(found)
                still_there = at in source if isinstance(source, dict) else at < len(source)
                where[key] = copy.deepcopy(source[at]) if still_there else None
            case 3 if isinstance(where[key], list):
                where[key] = where[key] * 2
            case _:
                other = odd(where[key]) if odd and draw.random() < 0.7 else None
                where[key] = near(draw, where[key]) if other is None else other
    return tree


def _under_one(draw: random.Random, tree: Any) -> list[tuple[Any, Any]]:
    """The places at or under one of the top's keys: the few small ones are met as often as those with thousands."""
    key = draw.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    return [(tree, key)] if draw.random() < 0.4 else list(places(tree[key])) or [(tree, key)]


def near(draw: random.Random, value: Any) -> Any:
    """Another value: often of the same type."""
    if draw.random() < 0.4:
        return draw.choice(ODD)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice((*INTEGERS, value + 1, value - 1, -value, value * 2, float(value)))
    if isinstance(value, float):
        return draw.choice((*FLOATS, -value, value * 1e6, str(value)))
    if isinstance(value, str):
        return draw.choice((*TEXTS, value + "x", value.upper(), value[:-1], [value]))
    return draw.choice(ODD)


def mutated_json(draw: random.Random, value: Any) -> bytes:
    """JSON of a mutated tree; now and then the text of it is damaged, deep or twice there."""
    text = json.dumps(mutated_tree(draw, value))
    match draw.randrange(12):
        case 0:
            return mutated_bytes(draw, text.encode())
        case 1:
            depth = draw.choice((100, 5000, 200_000))
            return b"[" * depth + text.encode() + b"]" * depth
        case 2:
            return text.encode() * 2
        case 3:
            return text.encode("utf-16")
    return text.encode()
