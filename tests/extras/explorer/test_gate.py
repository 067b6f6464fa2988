"""Who may ask the explorer, one thread with a bounded queue, and what happens when something fails."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from werkzeug.test import Client

from duetgan.extras.explorer import models
from duetgan.extras.explorer.app import App
from tests.extras.explorer.conftest import CLASSIFIER, grey, one_line, sample, signed_in


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        # another name of this machine (DNS rebinding) has no cookie
        *(({"Host": host}, 401) for host in ("evil.example", "localhost.evil.example", "192.0.2.1:7870")),
        *(
            ({"Origin": origin}, 403)
            for origin in ("http://evil.example", "http://[", "", "null", "http://localhost:1")
        ),
        *(({"Sec-Fetch-Site": site}, 403) for site in ("cross-site", "same-site")),
        ({"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_only_our_own_page_may_ask(client, headers, status):
    name = {"query_string": {"run": CLASSIFIER}, "data": grey()}
    for answer in (client.get("/api/runs", headers=headers), client.post("/api/classify", headers=headers, **name)):
        assert answer.status_code == status
        assert status == 200 or one_line(answer, status)


def test_a_token_is_needed(app):
    client = Client(app)
    for path in ("/", "/page.js", "/api/runs", "/?token=secreT", "/?token=%C3%A9", "/?token="):
        assert "?token=" in one_line(client.get(path), 401)
    answer = client.get("/?token=secret")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["Set-Cookie"]
    assert "SameSite=Lax" in answer.headers["Set-Cookie"]
    assert client.get("/api/runs").status_code == 200


PATHS = ("explore.py", "../explore.py", "%2e%2e/explore.py", "/etc/passwd", "page.js/", "api/", "api/runs/..", "\0")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", f"/{path}", 404) for path in PATHS),
        ("POST", "/api/draw", 405),
        ("GET", "/api/classify", 405),
        ("DELETE", "/", 405),
    ],
)
def test_no_path_is_opened_and_each_has_its_method(client, method, path, status, monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("opened"))
    one_line(client.open(path, method=method), status)


def test_a_full_queue_refuses_and_the_page_is_served(shown, monkeypatch):
    monkeypatch.setattr("duetgan.extras.explorer.app.WAITING", 1)
    app = App(shown, token="secret")
    client, going, begun = signed_in(app), threading.Event(), threading.Event()

    def work():
        begun.set()
        going.wait(30)
        return {}

    pool = ThreadPoolExecutor()
    slow = pool.submit(app.compute, work)
    assert begun.wait(30)
    answer = client.get("/api/draw", query_string=sample())
    assert "try again" in one_line(answer, 503)
    assert answer.headers["Retry-After"] == "2"
    assert client.get("/").status_code == 200
    going.set()
    slow.result(30)
    assert client.get("/api/draw", query_string=sample()).status_code == 200


def test_models_compute_one_after_the_other(app):
    seen, inside = set(), []

    def work():
        inside.append(1)
        seen.add(len(inside))
        time.sleep(0.01)
        inside.pop()
        return {}

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: app.compute(work), range(5)))
    assert seen == {1}


def test_a_fault_of_ours_is_one_line_and_a_traceback_in_the_terminal(client, monkeypatch, capsys):
    monkeypatch.setattr(models, "address", lambda *_: 1 / 0)
    assert "fault of the explorer" in one_line(client.get("/api/draw", query_string=sample()), 500)
    assert "ZeroDivisionError" in capsys.readouterr().err
