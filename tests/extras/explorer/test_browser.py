"""The explorer in headless Chromium: click, wait, look. Skipped where there is no chromium or chromedriver."""

import shutil
import subprocess
import tarfile

import numpy as np
import pytest
from PIL import Image

from tests.extras.explorer.browser import CHROMIUM, DRIVER, Browser
from tests.extras.explorer.conftest import grey
from tests.extras.explorer.test_explore import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
PAGES = {  # name -> what is true when it has been filled
    "draw": "document.querySelectorAll('#next img').length == 12 && $('#drawn').src",
    "mix": "$('#mix-mixed').src",
    "walk": "$('#walked').src",
    "edit": "$('#edited').src",
    "classify": "true",
}


@pytest.fixture(scope="module")
def place(folder):
    """The address of an explorer of the three runs."""
    process, address = start("--checkpoint", folder)
    yield address
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """axe-core's program, from npm; None where it cannot be had."""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        return None
    done = subprocess.run(["npm", "pack", "axe-core"], cwd=folder, capture_output=True, timeout=120, check=False)
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode or packed is None:
        return None
    with tarfile.open(packed) as archive:
        content = archive.extractfile("package/axe.min.js")
        return content.read().decode()


def wait(browser, condition):
    return browser.wait("(($) => " + condition + ")((selector) => document.querySelector(selector))")


def turn(browser, page):
    browser.run(f"location.hash = '{page}'")
    wait(browser, f"!$('#{page}').hidden && {PAGES[page]}")


def source(browser, name):
    return browser.run(f"return document.getElementById('{name}').src")


def colours(path):
    """How many the screenshot has, and how bright its corner is."""
    with Image.open(path) as image:
        levels = np.asarray(image.convert("L"))
    return len(np.unique(levels)), int(levels[2, 2])


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 390)])
def test_every_page_fits_and_axe_finds_nothing(place, axe, tmp_path, dark, width):
    with Browser(tmp_path / "profile", dark=dark, width=width) as browser:
        browser.open(place)
        assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") is dark
        for page in PAGES:
            turn(browser, page)
            if page == "classify":
                (tmp_path / "x.png").write_bytes(grey())
                browser.type("#file", str(tmp_path / "x.png"))
                wait(browser, "!$('#prediction').hidden && $('#evidence').src")
            seen, corner = colours(browser.shoot(tmp_path / f"{page}.png"))
            assert seen > 20
            assert (corner < 60) is dark
            assert browser.run("return document.documentElement.scrollWidth - innerWidth") <= 0
            if axe:
                browser.run(axe)
                told = "r.violations.map((v) => v.id + ' ' + v.impact + ' ' + v.nodes[0].html)"
                assert browser.run(f"return axe.run().then((r) => {told})") == []
        assert browser.complaints() == []
        if axe is None:
            pytest.skip("axe-core could not be had; all else was looked at")


def test_click_wait_look(place, tmp_path):
    with Browser(tmp_path / "profile") as browser:
        browser.open(place)
        turn(browser, "draw")
        browser.click("#next button:nth-child(2)")
        wait(browser, "$('#drawn-caption').textContent == 'dark, seed 2'")
        before = source(browser, "drawn")
        browser.run("const s = document.querySelector('#draw select[name=class]'); s.value = 'light';"
                    "s.dispatchEvent(new Event('change', {bubbles: true}))")  # fmt: skip
        wait(browser, "$('#drawn-caption').textContent == 'light, seed 2'")
        assert source(browser, "drawn") != before

        turn(browser, "mix")
        for box in browser.run("return [...document.querySelectorAll('#layers input')].map((box) => box.value)"):
            if not browser.run(f"return document.querySelector('#layers input[value=\"{box}\"]').checked"):
                browser.click(f'#layers input[value="{box}"]')
        wait(browser, "$('#mix-mixed').src == $('#mix-b').src && $('#mix-a').src != $('#mix-b').src")

        turn(browser, "walk")
        first = source(browser, "walked")
        browser.click("#play")
        wait(browser, f"$('#walked').src != {first!r}")
        browser.click("#play")

        turn(browser, "edit")
        assert browser.run("return document.getElementById('edited-caption').textContent").startswith("0: dark ")
        browser.run("const s = document.getElementById('amount'); s.value = 24; s.dispatchEvent(new Event('input'))")
        wait(browser, "$('#edited-caption').textContent.startsWith('+4: dark ')")
        browser.click("#reset")
        wait(browser, "$('#edited-caption').textContent.startsWith('0: dark ')")
