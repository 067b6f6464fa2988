"""Headless Chromium through chromedriver: the few commands of the W3C's WebDriver protocol that the tests need."""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
PATIENCE = 300  # s to wait for what should come: a search is long on a busy machine
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element


class Browser:
    """A window. Use as a context; the driver and the browser end with it."""

    def __init__(self, folder: Path) -> None:
        command = [str(DRIVER), "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._driver.stdout is not None
        lines = (re.search(r"successfully on port (\d+)", line) for line in self._driver.stdout)
        port = next(found[1] for found in lines if found)
        self._place = f"http://127.0.0.1:{port}/session"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        arguments += [f"--user-data-dir={folder}"]
        options: dict[str, Any] = {"binary": CHROMIUM, "args": arguments}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            made = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
        except OSError:
            self._driver.kill()
            raise
        self._place += f"/{made['sessionId']}"

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("", None, "DELETE")
        finally:
            self._driver.terminate()
            self._driver.communicate()

    def _ask(self, command: str, body: Any = None, method: str = "") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._place + command, data, method=method or ("POST" if data else "GET"))
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._ask("/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script, `return ...`; a promise is waited for."""
        return self._ask("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < end, f"never true: {script}; the page says {self.run(TOLD)!r}"
            time.sleep(0.05)
        return value

    def _element(self, selector: str) -> str:
        return self._ask("/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self._ask(f"/element/{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Keys as a person presses them; a file's path for a file input."""
        self._ask(f"/element/{self._element(selector)}/value", {"text": text})

    def complaints(self) -> list[str]:
        """What the browser's console has been told of errors."""
        return [entry["message"] for entry in self._ask("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"]


TOLD = "return document.getElementById('status')?.textContent"
