"""The explorer in headless Chromium: click, wait, look. Skipped where there is no chromium or chromedriver."""

import pytest

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


def wait(browser, condition):
    return browser.wait("(($) => " + condition + ")((selector) => document.querySelector(selector))")


def turn(browser, page):
    browser.run(f"location.hash = '{page}'")
    wait(browser, f"!$('#{page}').hidden && {PAGES[page]}")


def source(browser, name):
    return browser.run(f"return document.getElementById('{name}').src")


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

        turn(browser, "edit")
        assert browser.run("return document.getElementById('edited-caption').textContent").startswith("0: dark ")
        browser.run("const s = document.getElementById('amount'); s.value = 24; s.dispatchEvent(new Event('input'))")
        wait(browser, "$('#edited-caption').textContent.startsWith('+4: dark ')")
        browser.click("#reset")
        wait(browser, "$('#edited-caption').textContent.startsWith('0: dark ')")

        turn(browser, "classify")
        (tmp_path / "x.png").write_bytes(grey())
        browser.type("#file", str(tmp_path / "x.png"))
        wait(browser, "!$('#prediction').hidden && $('#evidence').src")
        assert browser.complaints() == []
