"""`duet explore` as a program: its options, its address, and its end."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from duetgan.extras.explorer.command import main
from duetgan.extras.explorer.models import open_runs
from duetgan.utils.distributed.process import run_cli
from tests.conftest import REPOSITORY


def start(*options):
    """The program, and the address that it prints."""
    command = [sys.executable, "-m", "duetgan", "explore", "--port", "0", "--device", "cpu", *map(str, options)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    place = re.search(r"http://\S+", process.stdout.readline())
    return process, place[0]


@pytest.mark.slow
def test_serves_until_ctrl_c(folder):
    process, place = start("--checkpoint", folder / "gan", "--checkpoint", folder / "classifier")
    try:
        assert place.startswith("http://127.0.0.1:")
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())  # keeps the token
        with browser.open(place) as answer:
            assert answer.status == 200
            assert "Server" not in answer.headers
        connection = http.client.HTTPConnection(place.split("/")[2])
        connection.putrequest("POST", "/api/classify?run=1")
        connection.putheader("Content-Length", str((32 << 20) + 2))
        connection.endheaders(bytes(1000))
        assert connection.getresponse().status == 413  # the rest is not waited for
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0
        assert process.stderr.read() == "ended\n"
    finally:
        process.kill()
        process.communicate()


def test_a_folder_stands_for_its_runs_once_each(folder):
    again = [str(folder / "gan"), str(folder / ".." / folder.name / "gan")]
    runs = open_runs([str(folder), *again], which="last", device=torch.device("cpu"))
    assert [Path(run.name).name for run in runs] == ["gan", "plain", "classifier"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "no such host"], "give another address or port"),
        (["--port", "99999"], "'99999' is not a whole number from 0 to 65,535"),
    ],
)
def test_bad_options_are_one_line(options, words, capsys):
    port = [] if "--port" in options else ["--port", "0"]
    assert run_cli(main, [*options, *port]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_each_start_has_its_own_token(folder, monkeypatch, capsys):
    class Server:
        def __init__(self, app, **_options):
            self.app = app

        def run(self):
            tokens.append(self.app.token)

    tokens: list = []
    monkeypatch.setattr("waitress.server.create_server", Server)
    monkeypatch.setattr("duetgan.extras.explorer.command.leave_threads", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for host in ("0.0.0.0", "127.0.0.1"):
        assert run_cli(main, ["--checkpoint", str(folder / "gan"), "--host", host, "--port", "0"]) == 0
    first, second = tokens
    assert first != second
    assert min(len(first), len(second)) > 20
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        rf"open http://{re.escape(socket.gethostname())}:\d+/\?token={re.escape(first)} in a browser", lines[0]
    )
    assert re.match(rf"open http://127\.0\.0\.1:\d+/\?token={re.escape(second)} in a browser", lines[1])
