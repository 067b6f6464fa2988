"""Who may ask the explorer, one thread with a bounded queue, and what happens when something fails."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from werkzeug.test import Client

from duetgan.extras.explorer import models
from duetgan.extras.explorer.app import App, Unavailable, Worker
from tests.extras.explorer.conftest import CLASSIFIER, grey, one_line, sample

HOSTS = {"evil.example": 403, "localhost.evil.example": 403, "192.0.2.1:7870": 403, "[": 403, "": 403,
         "localhost:7870": 200, "127.0.0.1": 200, "[::1]:80": 200, "LOCALHOST": 200}  # fmt: skip
ORIGINS = ("http://evil.example", "http://[", "", "null", "http://localhost:1")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(({"Host": host}, status) for host, status in HOSTS.items()),  # another name of this machine is an attack
        *(({"Origin": origin}, 403) for origin in ORIGINS),
        *(({"Sec-Fetch-Site": site}, 403) for site in ("cross-site", "same-site")),
        ({"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_only_our_own_page_on_this_machine_may_ask(client, headers, status):
    name = {"query_string": {"run": CLASSIFIER}, "data": grey()}
    for answer in (client.get("/api/runs", headers=headers), client.post("/api/classify", headers=headers, **name)):
        assert answer.status_code == status
        assert status == 200 or one_line(answer, status)


def test_a_token_is_needed_beyond_this_machine(shown):
    client = Client(App(shown, Worker(), token="secret"))
    far = {"Host": "box.example:7870"}
    for path in ("/", "/page.js", "/api/runs", "/?token=secreT", "/?token=%C3%A9", "/?token="):
        assert "?token=" in one_line(client.get(path, headers=far), 401)
    answer = client.get("/?token=secret", headers=far)
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["Set-Cookie"]
    assert "SameSite=Lax" in answer.headers["Set-Cookie"]
    client.set_cookie("duet-explorer-80", "secret", domain="box.example")
    assert client.get("/api/runs", headers=far, base_url="http://box.example").status_code == 200


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


def test_a_full_queue_refuses_and_the_page_is_served(shown):
    app = App(shown, Worker(waiting=1))
    client, going, begun = Client(app), threading.Event(), threading.Event()

    def work():
        begun.set()
        going.wait(30)

    pool = ThreadPoolExecutor()
    slow = pool.submit(app.worker.run, work)
    assert begun.wait(30)
    answer = client.get("/api/draw", query_string=sample())
    assert "try again" in one_line(answer, 503)
    assert answer.headers["Retry-After"] == "2"
    assert client.get("/").status_code == 200
    going.set()
    slow.result(30)
    assert client.get("/api/draw", query_string=sample()).status_code == 200
    app.worker.end()


def test_models_compute_in_one_thread_one_after_the_other():
    worker, seen, inside = Worker(), set(), []

    def work():
        inside.append(1)
        seen.add((threading.get_ident(), len(inside)))
        inside.pop()

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(lambda _: worker.run(work), range(5)))
    worker.end()
    assert len(seen) == 1
    assert seen != {(threading.get_ident(), 1)}


def test_the_end_frees_those_who_wait_and_stops_a_search():
    worker, begun, ended = Worker(), threading.Event(), threading.Event()

    def search():
        begun.set()
        try:
            while True:
                worker.tick()
        except Unavailable:
            ended.set()
            raise

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(worker.run, search) for _ in range(3)]
        assert begun.wait(30)
        worker.end()
        assert [str(each.exception(10)) for each in waiting] == ["the explorer is ending"] * 3
    assert ended.wait(10)
    with pytest.raises(Unavailable):
        worker.run(search)


def test_a_fault_of_ours_is_one_line_and_a_traceback_in_the_terminal(client, monkeypatch, capsys):
    monkeypatch.setattr(models, "address", lambda *_: 1 / 0)
    assert "fault of the explorer" in one_line(client.get("/api/draw", query_string=sample()), 500)
    assert "ZeroDivisionError" in capsys.readouterr().err
