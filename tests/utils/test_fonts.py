"""H15: words in images, whatever their script: letters that a font has, or numbers, and never boxes or warnings."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from duetgan.data.inspect import save_grid
from duetgan.data.lmdb.reader import LMDBReader
from duetgan.data.records import pack_arrays
from duetgan.metrics.images import save_confusion
from duetgan.utils import images as fonts
from tests.data.conftest import sample_images

CAT = "\u732b"


@pytest.fixture
def only_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {fonts.OWN: fonts._paths()[fonts.OWN]}
    monkeypatch.setattr(fonts, "_paths", lambda: own)


def test_what_no_font_has_is_written_as_its_number(only_own: None) -> None:
    assert fonts.drawable("cat") == "cat"
    assert fonts.drawable("café Ж") == "café Ж"
    assert fonts.drawable(f"{CAT} a\nb\u2029") == "\\u732b a\\nb\\u2029"
    assert fonts.drawable("\U0001f40e") == "\\U0001f40e"
    text, font = fonts.legible(f"x{CAT}", 12)
    assert (text, font.getname()[0]) == ("x\\u732b", "DejaVu Sans")


def test_an_installed_font_is_taken_for_letters_that_ours_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = fonts._paths() | {"Noto Sans CJK SC": fonts._paths()[fonts.OWN]}
    monkeypatch.setattr(fonts, "_paths", lambda: paths)
    latin = frozenset(map(ord, "abc "))
    letters = {fonts.OWN: latin | {ord("é")}, "Noto Sans CJK SC": latin | {ord(CAT)}}
    monkeypatch.setattr(fonts, "_letters", letters.__getitem__)
    chosen: list[str] = []
    monkeypatch.setattr(fonts, "_font", lambda name, size: chosen.append(name))
    assert [fonts.legible(text, 9)[0] for text in ("abc", f"a{CAT}", f"é{CAT}")] == ["abc", f"a{CAT}", "é\\u732b"]
    assert chosen == [fonts.OWN, "Noto Sans CJK SC", fonts.OWN]  # no single font has é and the cat
    assert fonts.drawable(f"é{CAT}") == f"é{CAT}"  # matplotlib takes each letter from another


def test_class_names_of_all_scripts_are_drawn_without_a_warning(only_own: None, tmp_path: Path) -> None:
    names = ["plain", CAT, "a\nb", "\u0634\u062c\u0631\u0629"]
    pack_arrays(tmp_path / "x.lmdb", sample_images(8), np.arange(8) % 4, names)
    drawn: list[str] = []
    text = ImageDraw.ImageDraw.text

    def draw(*arguments: Any, **options: Any) -> None:
        drawn.append(arguments[2])
        text(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(ImageDraw.ImageDraw, "text", draw)
        with LMDBReader(tmp_path / "x.lmdb") as reader:
            save_grid(reader, tmp_path / "x.png")
        save_confusion(np.eye(4).astype(int).tolist(), names, tmp_path / "c.png")
    assert drawn == ["plain", "\\u732b", "a b", names[3]]
    with Image.open(tmp_path / "c.png") as image:
        image.verify()
