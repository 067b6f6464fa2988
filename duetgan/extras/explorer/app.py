"""The explorer as a web application (WSGI).

It admits only browsers that send the token, parses their requests, and answers in JSON. Models
compute for one request at a time; a limited number of requests can wait. A browser names a run by
its index. Nothing that it sends becomes part of a file name.
"""

import hmac
import json
import sys
import threading
import traceback
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound, Unauthorized
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

import duetgan.reporting
from duetgan.data.errors import ImageError
from duetgan.extras.explorer import models
from duetgan.extras.explorer.models import Document, LoadedRun, Source
from duetgan.utils import files
from duetgan.utils.config.cli import number as number_type
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean, printable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

WAITING = 8  # largest number of requests that compute or wait to compute


class Unavailable(Exception):
    """An error for a request that comes when too many others are waiting."""


FOLDER = Path(__file__).parent
STATIC = {  # path -> (file, content type) of all files that are served
    "/": (FOLDER / "page.html", "text/html"),
    "/report.css": (Path(duetgan.reporting.__path__[0]) / "report.css", "text/css"),
    "/page.css": (FOLDER / "page.css", "text/css"),
    "/page.js": (FOLDER / "page.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; img-src 'self' data:; script-src 'self'; connect-src 'self' data:; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
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


class Query:
    """The parameters of a request.

    The methods read parameters and raise UserError if one is missing or invalid.
    """

    def __init__(self, request: Request, runs: Sequence[LoadedRun]) -> None:
        self._request = request
        self._args = request.args
        self._runs = runs

    def number(self, name: str, low: int, high: int, default: str = "", kind: type = int) -> Any:
        """Return the parameter `name` as a number of type `kind` from `low` to `high`.

        `default` is the text of a missing parameter. If it is "", the parameter is required.
        """
        with explained(ArgumentTypeError, lambda error: f"{name} {error}"):
            return number_type(kind, low, high)(self._args.get(name, default))

    def run(self, task: str, name: str = "run") -> LoadedRun:
        """Read the index of a run from a request parameter, and return the run.

        `name` is the name of the request parameter. Raises UserError unless the run's task is
        `task`, "gan" or "classifier".
        """
        run = self._runs[self.number(name, 0, len(self._runs) - 1)]
        if run.task != task:
            raise UserError(f"{name}: {run.name} is {TASKS[run.task]}; {TASKS[task]} is needed")
        return run

    def source(self, run: LoadedRun) -> Source:
        """Describe a sample of `run` by the request parameters `seed`, `class` and `psi`."""
        label = self.label("class", run) if run.classes else None
        seed = self.number("seed", 0, LARGEST_SEED)
        return Source(seed, label, self.number("psi", 0, 2, "1", float))

    def sources(self, run: LoadedRun) -> list[Source]:
        """Describe samples of `run` with successive seeds.

        The request parameters are those of `source`, and `count`, the number of samples.
        """
        first, count = self.source(run), self.number("count", 1, MOST_DRAWN, "1")
        seed = min(first.seed, LARGEST_SEED - count + 1)
        return [replace(first, seed=seed + i) for i in range(count)]

    def target(self, _: LoadedRun) -> tuple[LoadedRun, str]:
        """Return a classifier and the name of one of its classes.

        The parameter `by` is the index of the classifier's run, the parameter `target` is the class
        name.
        """
        by = self.run("classifier", "by")
        return by, by.classes[self.label("target", by)]

    def label(self, name: str, run: LoadedRun) -> int:
        """Read a class name from a request parameter, and return the label of this class in `run`.

        `name` is the name of the request parameter, such as "class".
        """
        class_name = self._args.get(name, "")
        if class_name not in run.classes:
            hint = did_you_mean(class_name[:80], run.classes)
            raise UserError(f"{name} {class_name[:80]!r}: no class of {run.name}{hint}")
        return run.classes.index(class_name)

    def image(self, _: LoadedRun) -> bytes:
        """Return the image file in the body of the request, as bytes.

        Raises UserError if there is none or if it exceeds the size limit.
        """
        if not self._request.content_length:
            raise UserError("no image was sent; choose a file")
        with explained(files.Refused, lambda error: f"the image {error}"):
            return files.read_stream(self._request.stream, files.UPLOAD)


class App:
    """The WSGI application of the explorer."""

    def __init__(
        self,
        runs: Sequence[LoadedRun],
        *,
        token: str,  # secret that a browser must send
    ) -> None:
        self.runs = runs
        self._slots = threading.Semaphore(WAITING)
        self._computing = threading.Lock()
        self.token = token
        self._static = {
            path: (files.read_file(file, files.CONFIG), kind)
            for path, (file, kind) in STATIC.items()
        }
        self._get: dict[str, Callable[[Query], Document]] = {
            "/api/runs": self._list_runs,
            "/api/draw": self._handler("gan", models.draw, Query.sources),
            "/api/edit": self._handler("gan", models.edit, Query.source, Query.target),
        }
        self._post: dict[str, Callable[[Query], Document]] = {  # requests whose body is an image
            "/api/classify": self._handler("classifier", models.classify, Query.image),
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
        """Check that a request may use the explorer.

        Returns None if the request's cookie contains the token. If its address contains the token,
        returns a redirect that sets this cookie. Raises HTTPException for all other requests, and
        for requests that other web pages send.
        """
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = origin is not None and origin.partition("://")[2] != request.headers.get("Host")
        if foreign or (request.path != "/" and site not in ("same-origin", "none")):
            raise Forbidden("the explorer answers only to its own page")
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
        return Response(json.dumps(answer, allow_nan=False), content_type="application/json")

    # --- handlers

    def _handler(
        self,
        task: str,
        answer: Callable[..., Document],
        *parameters: Callable[[Query, LoadedRun], object],
    ) -> Callable[[Query], Document]:
        """Return a function that answers a query by `answer(run, *values)`.

        `run` is the run that the query names; it must be of task `task`. Each of `values` is the
        result of one of the functions `parameters`, which get the query and the run.
        """

        def handle(query: Query) -> Document:
            run = query.run(task)
            values = [parameter(query, run) for parameter in parameters]
            return self.compute(lambda: answer(run, *values))

        return handle

    def compute(self, work: Callable[[], Document]) -> Document:
        """Run `work()` while no other work runs, and return its result.

        Raises Unavailable if WAITING requests compute or wait already.
        """
        if not self._slots.acquire(blocking=False):
            raise Unavailable("too many requests are waiting; try again in a moment")
        try:
            with self._computing:
                return work()
        finally:
            self._slots.release()

    def _list_runs(self, _: Query) -> Document:
        return {"runs": [run.facts() for run in self.runs], "upload": files.UPLOAD.limit}


def _line(text: str, status: int) -> Response:
    line = printable(" ".join(text.split()))
    return Response(line, status, content_type="text/plain; charset=utf-8")


def _same(secret: str | None, token: str) -> bool:
    if secret is None:
        return False
    return hmac.compare_digest(secret.encode(errors="replace"), token.encode())
