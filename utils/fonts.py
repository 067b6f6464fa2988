r"""Letters in images: matplotlib's DejaVu Sans, so that images look alike everywhere; for scripts that it lacks a font
that is installed on this machine. What none of them has is written as its number (`\u732b`), never as a box.

A font with the letters of China, Japan and Korea takes 5 to 20 MB, so none comes along.
"""

from functools import cache

from PIL import ImageFont

from utils.door import printable

OWN = "DejaVu Sans"
OTHERS = (  # the most common ones with many scripts, in order
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans",
    "Arial Unicode MS",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Unifont",
)


@cache
def _paths() -> dict[str, str]:
    """The fonts that there are, by name, in order."""
    from matplotlib.font_manager import fontManager  # slow to import

    found = {entry.name: entry.fname for entry in reversed(fontManager.ttflist)}
    return {OWN: str(fontManager.findfont(OWN))} | {name: found[name] for name in OTHERS if name in found}


@cache
def _letters(name: str) -> frozenset[int]:
    """The characters that a font has."""
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(_paths()[name]).get_charmap())


def families() -> list[str]:
    """Names for matplotlib, which takes each letter from the first that has it."""
    return list(_paths())


def drawable(text: str) -> str:
    """A line of text, `printable`, with what no font has written as its number."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, printable(text)))


def _shown(character: str) -> str:
    if any(ord(character) in _letters(name) for name in families()):
        return character
    return character.encode("unicode_escape").decode("ascii")


def legible(text: str, size: int) -> tuple[str, ImageFont.FreeTypeFont]:
    """A line of text as it can be drawn by one font, and that font, of `size` px: the first that has all letters."""
    text = drawable(text)
    wanted = {ord(character) for character in text}
    name = next((name for name in families() if wanted <= _letters(name)), OWN)
    if not wanted <= _letters(name):  # no single one has all of them
        text = "".join(c if ord(c) in _letters(OWN) else c.encode("unicode_escape").decode("ascii") for c in text)
    return text, _font(name, size)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_paths()[name], size)
