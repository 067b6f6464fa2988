"""Aligned columns, figures and shortened lines."""

import pytest

from duetgan.utils.text import columns, decimal, shorten


@pytest.mark.parametrize(
    ("align", "expected"),
    [
        ("<>", "name     n   share\na       12  0.5000\nlonger   3       -"),
        ("<", "name    n   share\na       12  0.5000\nlonger  3   -"),
        ("<><", "name     n  share\na       12  0.5000\nlonger   3  -"),
    ],
)
def test_columns_are_aligned_and_lines_end_without_spaces(align, expected):
    assert columns([("name", "n", "share"), ("a", "12", "0.5000"), ["longer", "3", "-"]], align) == expected


def test_columns_of_no_row_of_empty_cells_and_of_different_length():
    assert columns([]) == ""
    assert columns([("a", ""), ("", "b")]) == "a\n   b"
    with pytest.raises(ValueError, match="zip"):
        columns([("a", "b"), ("c",)])
    assert (decimal(0.12345), decimal(2.0, 1), decimal(None)) == ("0.1235", "2.0", "-")


def test_long_captions_lose_their_middle():
    assert shorten("123456789", 9) == "123456789"
    assert shorten("1234567890", 9) == "1234…7890"
    assert len(shorten("x" * 50, 8)) == 8
    assert shorten("abcdef", 30, lambda text: 10 * len(text)) == "a…f"
    assert shorten("abc", 0) == "a…"  # something is left
