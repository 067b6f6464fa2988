"""The explorer as a web application (WSGI): access control, the parsing of requests, the answers,
and the single thread in which models compute, with a bounded queue.

A browser identifies runs and steps by index: nothing that it sends becomes part of a file name.
"""

import hmac
import json
import sys
import threading
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args
from urllib.parse import urlsplit

from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound, Unauthorized
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

import duetgan.reporting
from duetgan.data.errors import ImageError
from duetgan.extras.explorer import models
from duetgan.extras.explorer.models import Document, LoadedRun, Source, compare_page
from duetgan.inference.samples import parse_layers
from duetgan.models.gan import TruncationMean
from duetgan.reporting.pictures import number, picture
from duetgan.utils import files
from duetgan.utils.config.cli import number as number_type
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean, printable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

WAITING = 8  # largest number of requests that compute or wait for the models' thread
POLL = 0.2  # s between two checks for the end of the explorer

T = TypeVar("T")


class Unavailable(Exception):
    """An error: the queue of requests is full, or the explorer is ending."""


class Worker:
    """A thread that runs functions one after the other, with a bounded queue."""

    def __init__(self, waiting: int = WAITING) -> None:
        self._slots = threading.Semaphore(waiting)
        self._thread = ThreadPoolExecutor(1, "models")
        self._ending = threading.Event()

    def run(self, work: Callable[[], T]) -> T:
        """Run `work()` in the thread and return its result or raise its exception.

        Raises Unavailable if the queue is full or the explorer is ending.
        """
        if not self._slots.acquire(blocking=False):
            raise Unavailable("too many requests are waiting; try again in a moment")
        try:
            future = self._thread.submit(work)
        except RuntimeError:
            self._slots.release()
            raise Unavailable("the explorer is ending") from None
        future.add_done_callback(lambda _: self._slots.release())
        while not future.done():
            self.tick()
            wait([future], timeout=POLL)
        with explained(CancelledError, lambda _: Unavailable("the explorer is ending")):
            return future.result()

    def tick(self) -> None:
        """Raise Unavailable if the explorer is ending. Long work calls this regularly."""
        if self._ending.is_set():
            raise Unavailable("the explorer is ending")

    def end(self) -> None:
        """Fail all waiting requests at once, and accept no more work."""
        self._ending.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


FOLDER = Path(__file__).parent
STATIC = {  # path -> (file, content type) of all files that are served
    "/": (FOLDER / "page.html", "text/html"),
    "/report.css": (Path(duetgan.reporting.__path__[0]) / "report.css", "text/css"),
    "/page.css": (FOLDER / "page.css", "text/css"),
    "/page.js": (FOLDER / "page.js", "text/javascript"),
}
# The names of this machine. A request for another name comes from a DNS rebinding attack.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; img-src 'self' data:; script-src 'self'; connect-src 'self' data:; style-src 'self'; "
    "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # The charts have style attributes.
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TASKS = {"gan": "a GAN", "classifier": "a classifier"}
LARGEST_SEED = 2**32 - 1
MOST_DRAWN = 16  # largest number of samples that one request draws

Answer = Document | str  # a JSON object, or HTML


class Query:
    """The parameters of a request. Methods raise UserError for missing or invalid ones."""

    def __init__(self, request: Request, runs: Sequence[LoadedRun]) -> None:
        self._request = request
        self._args = request.args
        self._runs = runs

    def number(self, name: str, low: int, high: int, default: str = "", kind: type = int) -> Any:
        """Return the value of the parameter `name`, a number of type `kind` in `low`..`high`."""
        with explained(ArgumentTypeError, lambda error: f"{name} {error}"):
            return number_type(kind, low, high)(self._args.get(name, default))

    def run(self, task: str | None = None, name: str = "run") -> LoadedRun:
        """Return the run whose index is the parameter `name`. Raises UserError if its task is not
        `task` (None: any).
        """
        run = self._runs[self.number(name, 0, len(self._runs) - 1)]
        if task is not None and run.task != task:
            raise UserError(f"{name}: {run.name} is {TASKS[run.task]}; {TASKS[task]} is needed")
        return run

    def source(self, run: LoadedRun, suffix: str = "") -> Source:
        """Return the sample that the parameters `seed`, `class`, `psi` and `mean` describe.

        `suffix` is appended to the names `seed` and `class`.
        """
        label = self.label(f"class{suffix}", run) if run.classes else None
        mean = self._args.get("mean", "class")
        if mean not in get_args(TruncationMean):
            raise UserError(f"mean {mean[:80]!r}: give {' or '.join(get_args(TruncationMean))}")
        seed = self.number(f"seed{suffix}", 0, LARGEST_SEED)
        psi = self.number("psi", 0, 2, "1", float)
        return Source(seed, label, psi, cast(TruncationMean, mean))

    def sources(self, run: LoadedRun) -> list[Source]:
        """Return samples with successive seeds, as many as the parameter `count`."""
        first, count = self.source(run), self.number("count", 1, MOST_DRAWN, "1")
        seed = min(first.seed, LARGEST_SEED - count + 1)
        return [replace(first, seed=seed + i) for i in range(count)]

    def pair(self, run: LoadedRun) -> tuple[Source, Source]:
        """Return the two samples whose parameters have the suffixes `_a` and `_b`."""
        return self.source(run, "_a"), self.source(run, "_b")

    def target(self, _: LoadedRun) -> tuple[LoadedRun, str]:
        """Return the classifier whose index is the parameter `by`, and its class named `target`."""
        by = self.run("classifier", "by")
        return by, by.classes[self.label("target", by)]

    def label(self, name: str, run: LoadedRun) -> int:
        """Return the label of the class whose name is the value of the parameter `name`."""
        class_name = self._args.get(name, "")
        if class_name not in run.classes:
            hint = did_you_mean(class_name[:80], run.classes)
            raise UserError(f"{name} {class_name[:80]!r}: no class of {run.name}{hint}")
        return run.classes.index(class_name)

    def layers(self, run: LoadedRun) -> list[int]:
        """Return the layers in the parameter `layers`, such as `0-3,6`; none if it is empty."""
        text = self._args.get("layers", "")[:400]
        return parse_layers(text, getattr(run.model, "num_ws", 0)) if text else []

    def image(self, _: LoadedRun) -> bytes:
        """Return the body of the request: an image file within the size limit."""
        if not self._request.content_length:
            raise UserError("no image was sent; choose a file")
        with explained(files.Refused, lambda error: f"the image {error}"):
            return files.read_stream(self._request.stream, files.UPLOAD)


class App:
    """The WSGI application of the explorer."""

    def __init__(
        self,
        runs: Sequence[LoadedRun],
        worker: Worker,
        *,
        # secret that a browser must send; None: only requests to a host in LOOPBACK are answered
        token: str | None = None,
        data: str | None = None,  # the classifiers' packed training images; None: as in the config
    ) -> None:
        self.runs = runs
        self.worker = worker
        self.token = token
        self._static = {
            path: (files.read_file(file, files.CONFIG), kind)
            for path, (file, kind) in STATIC.items()
        }
        influential = partial(models.influential_images, data=data)
        nearest = partial(models.nearest, tick=worker.tick)
        self._get: dict[str, Callable[[Query], Answer]] = {
            "/api/runs": self._list_runs,
            "/api/draw": self._handler("gan", models.draw, Query.sources),
            "/api/mix": self._handler("gan", models.mix, Query.pair, Query.layers),
            "/api/walk": self._handler("gan", models.walk, Query.pair),
            "/api/edit": self._handler("gan", models.edit, Query.source, Query.target),
            "/api/history": self._history,
            "/api/compare": self._compare,
        }
        self._post: dict[str, Callable[[Query], Answer]] = {  # requests whose body is an image
            "/api/classify": self._handler("classifier", models.classify, Query.image),
            "/api/influence": self._handler("classifier", influential, Query.image),
            "/api/nearest": self._handler("gan", nearest, Query.image),
        }

    def __call__(
        self, environ: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        request = Request(environ)
        try:
            response = self._admit(request) or self._answer(request)
        except HTTPException as error:
            response = _line(str(error.description), error.code or 500)
        except ImageError as error:
            response = _line(f"the image {error}", 400)
        except UserError as error:
            response = _line(str(error), 400)
        except Unavailable as error:
            response = _line(str(error), 503)
            response.headers["Retry-After"] = "2"
        except Exception:  # A bug must not end the server; its traceback goes to the terminal.
            traceback.print_exc(file=sys.stderr)
            response = _line("a fault of the explorer; the traceback is in its terminal", 500)
        response.headers.extend(HEADERS)
        return response(environ, start_response)

    def _admit(self, request: Request) -> Response | None:
        """Return None if the browser may use the explorer. For an address that contains the token,
        return a redirect that sets the cookie. Raises HTTPException for all other requests.
        """
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = origin is not None and origin.partition("://")[2] != request.headers.get("Host")
        if foreign or (request.path != "/" and site not in ("same-origin", "none")):
            raise Forbidden("the explorer answers only to its own page")
        if self.token is None:
            if _host_name(request) not in LOOPBACK:
                raise Forbidden(
                    "the explorer answers to localhost only; start it with --host to open it to others"
                )
            return None
        # Cookies are shared by all ports of a host, so the name contains the port.
        cookie = f"duet-explorer-{request.environ['SERVER_PORT']}"
        if _same(request.args.get("token"), self.token):
            response = redirect("/", 303)
            response.set_cookie(cookie, self.token, httponly=True, samesite="Lax")
            return response
        if not _same(request.cookies.get(cookie), self.token):
            raise Unauthorized("open the address that the explorer printed; it ends in ?token=...")
        return None

    def _answer(self, request: Request) -> Response:
        static = self._static.get(request.path)
        handler = self._get.get(request.path) or self._post.get(request.path)
        method = "POST" if request.path in self._post else "GET"
        if (static or handler) and request.method != method:
            raise MethodNotAllowed([method], f"use the method {method}")
        if static:
            return Response(static[0], content_type=f"{static[1]}; charset=utf-8")
        if not handler:
            raise NotFound("not found")
        answer = handler(Query(request, self.runs))
        if isinstance(answer, str):
            html = answer.encode(errors="replace")
            return Response(html, content_type="text/html; charset=utf-8")
        return Response(json.dumps(answer, allow_nan=False), content_type="application/json")

    # --- handlers; everything that needs a model runs in the worker's thread

    def _handler(
        self,
        task: str,
        answer: Callable[..., Answer],
        *parameters: Callable[[Query, LoadedRun], object],
    ) -> Callable[[Query], Answer]:
        """Return a handler that answers a query by `answer(run, *values)`; the run must be of
        `task`, and each of `parameters` gets a value from the query.
        """

        def handle(query: Query) -> Answer:
            run = query.run(task)
            values = [parameter(query, run) for parameter in parameters]
            return self.worker.run(lambda: answer(run, *values))

        return handle

    def _list_runs(self, _: Query) -> Answer:
        return {"runs": [run.facts() for run in self.runs], "upload": files.UPLOAD.limit}

    def _compare(self, query: Query) -> Answer:
        a, b = query.run(name="a"), query.run(name="b")
        return self.worker.run(lambda: compare_page(a, b))

    def _history(self, query: Query) -> Answer:
        samples = query.run().files().samples
        if not samples:
            raise UserError("this run has saved no samples")
        path = samples[query.number("place", 0, len(samples) - 1)]
        return {**picture(path, f"step {number(int(path.stem.removeprefix('step-')))}")}


def _line(text: str, status: int) -> Response:
    line = printable(" ".join(text.split()))
    return Response(line, status, content_type="text/plain; charset=utf-8")


def _same(secret: str | None, token: str) -> bool:
    if secret is None:
        return False
    return hmac.compare_digest(secret.encode(errors="replace"), token.encode())


def _host_name(request: Request) -> str | None:
    try:
        return urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        return None
