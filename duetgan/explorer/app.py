"""The explorer as a web application (WSGI): who may ask, what is asked, and the answers; the one
thread in which models compute, and the bounded queue before it.

A browser names runs by their number and steps by their place: nothing that it sends is ever part of
a file's name.
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
from typing import Any, TypeVar, cast, get_args
from urllib.parse import urlsplit

from werkzeug.exceptions import Forbidden, HTTPException, MethodNotAllowed, NotFound, Unauthorized
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

import duetgan.reporting
from duetgan.data.errors import ImageError
from duetgan.explorer import models
from duetgan.explorer.models import Shown, Source, compare_page
from duetgan.inference.samples import parse_layers
from duetgan.models.gan import TruncationMean
from duetgan.reporting.pictures import number, picture
from duetgan.utils import bounded
from duetgan.utils.config.cli import number as number_type
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean, printable

WAITING = 8  # requests that compute or wait, at most
LOOK = 0.2  # s between two looks at whether all is to end

T = TypeVar("T")


class Unavailable(Exception):
    """There is no place in the queue, or the explorer is ending; the message says which."""


class Worker:
    """Runs what it is given one after the other, in a thread of its own."""

    def __init__(self, waiting: int = WAITING) -> None:
        self._places = threading.Semaphore(waiting)
        self._thread = ThreadPoolExecutor(1, "models")
        self._ending = threading.Event()

    def run(self, work: Callable[[], T]) -> T:
        """What `work()` returns or raises. Raises Unavailable."""
        if not self._places.acquire(blocking=False):
            raise Unavailable("too many requests are waiting; try again in a moment")
        try:
            future = self._thread.submit(work)
        except RuntimeError:
            self._places.release()
            raise Unavailable("the explorer is ending") from None
        future.add_done_callback(lambda _: self._places.release())
        while not future.done():
            self.tick()
            wait([future], timeout=LOOK)
        with explained(CancelledError, lambda _: Unavailable("the explorer is ending")):
            return future.result()

    def tick(self) -> None:
        """For work that takes long, to be called now and then: raises Unavailable where all is to
        end.
        """
        if self._ending.is_set():
            raise Unavailable("the explorer is ending")

    def end(self) -> None:
        """Let those who wait go at once, and start nothing more."""
        self._ending.set()
        self._thread.shutdown(wait=False, cancel_futures=True)


HERE = Path(__file__).parent
STATIC = {  # all the files that are served, read at the start
    "/": (HERE / "page.html", "text/html"),
    "/report.css": (Path(duetgan.reporting.__path__[0]) / "report.css", "text/css"),
    "/page.css": (HERE / "page.css", "text/css"),
    "/page.js": (HERE / "page.js", "text/javascript"),
}
# names of this machine; another name that leads here is an attack
LOOPBACK = ("localhost", "127.0.0.1", "::1")
POLICY = (
    "default-src 'none'; img-src 'self' data:; script-src 'self'; connect-src 'self' data:; style-src 'self'; "
    "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)  # attributes: of the charts
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LARGEST_SEED = 2**32 - 1
MOST_DRAWN = 16  # samples of one request

Answer = dict[str, Any] | str  # an object, or HTML


class Asked:
    """What a request asks for. Every getter raises UserError for what is missing or out of range."""

    def __init__(self, request: Request, runs: Sequence[Shown]) -> None:
        self._request, self._args, self._runs = request, request.args, runs

    def number(self, name: str, low: int, high: int, default: str = "", kind: type = int) -> Any:
        """A number from `low` to `high`."""
        with explained(ArgumentTypeError, lambda why: f"{name} {why}"):
            return number_type(kind, low, high)(self._args.get(name, default))

    def run(self, task: str | None = None, name: str = "run") -> Shown:
        """A run by its number, of that task."""
        shown = self._runs[self.number(name, 0, len(self._runs) - 1)]
        if task not in (None, shown.task):
            raise UserError(f"{name}: {shown.name} is a {shown.task}'s, and a {task}'s is needed")
        return shown

    def source(self, shown: Shown, which: str = "") -> Source:
        """A sample: `seed`, `class`, `psi` and `mean`, the first two with `which` behind."""
        label = self.label(f"class{which}", shown) if shown.classes else None
        mean = self._args.get("mean", "class")
        if mean not in get_args(TruncationMean):
            raise UserError(f"mean {mean[:80]!r}: give {' or '.join(get_args(TruncationMean))}")
        seed, psi = (
            self.number(f"seed{which}", 0, LARGEST_SEED),
            self.number("psi", 0, 2, "1", float),
        )
        return Source(seed, label, psi, cast(TruncationMean, mean))

    def sources(self, shown: Shown) -> list[Source]:
        """A sample and those of the seeds after it, `count` in all."""
        first, count = self.source(shown), self.number("count", 1, MOST_DRAWN, "1")
        seed = min(first.seed, LARGEST_SEED - count + 1)
        return [replace(first, seed=seed + place) for place in range(count)]

    def pair(self, shown: Shown) -> tuple[Source, Source]:
        """The samples A and B."""
        return self.source(shown, "_a"), self.source(shown, "_b")

    def target(self, _: Shown) -> tuple[Shown, str]:
        """A classifier's run `by`, and one of its classes."""
        by = self.run("classifier", "by")
        return by, by.classes[self.label("target", by)]

    def label(self, name: str, shown: Shown) -> int:
        """The number of a class of the run."""
        given = self._args.get(name, "")
        if given not in shown.classes:
            raise UserError(
                f"{name} {given[:80]!r}: no class of {shown.name}{did_you_mean(given[:80], shown.classes)}"
            )
        return shown.classes.index(given)

    def layers(self, shown: Shown) -> list[int]:
        """Layers like `0-3,6`; none is allowed."""
        text = self._args.get("layers", "")[:400]
        return parse_layers(text, getattr(shown.model, "num_ws", 0)) if text else []

    def image(self, _: Shown) -> bytes:
        """The bytes that were sent, of an image within the limit."""
        if not self._request.content_length:
            raise UserError("no image was sent; choose a file")
        with explained(bounded.Refused, lambda why: f"the image {why}"):
            return bounded.read_stream(self._request.stream, bounded.UPLOAD)


class App:
    """The application. `token`: what a browser must know; None: only this machine's own names are
    answered.
    """

    def __init__(
        self,
        runs: Sequence[Shown],
        worker: Worker,
        *,
        token: str | None = None,
        data: str | None = None,
    ) -> None:
        self.runs, self.worker, self.token = runs, worker, token
        self._static = {
            path: (bounded.read_file(file, bounded.CONFIG), kind)
            for path, (file, kind) in STATIC.items()
        }
        self._asks: dict[str, Callable[[Asked], Answer]] = {
            "/api/runs": lambda _: {
                "runs": [shown.facts() for shown in runs],
                "upload": bounded.UPLOAD.limit,
            },
            "/api/draw": self._of("gan", models.draw, Asked.sources),
            "/api/mix": self._of("gan", models.mix, Asked.pair, Asked.layers),
            "/api/walk": self._of("gan", models.walk, Asked.pair),
            "/api/edit": self._of("gan", models.edit, Asked.source, Asked.target),
            "/api/history": self._history,
            "/api/compare": lambda asked: worker.run(
                partial(compare_page, asked.run(name="a"), asked.run(name="b"))
            ),
        }
        self._takes: dict[str, Callable[[Asked], Answer]] = {  # an image, by POST
            "/api/name": self._of("classifier", models.name, Asked.image),
            "/api/spoke": self._of("classifier", partial(models.spoke_for, data=data), Asked.image),
            "/api/nearest": self._of("gan", partial(models.nearest, tick=worker.tick), Asked.image),
        }

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = Request(environ)
        try:
            response = self._admit(request) or self._answer(request)
        except HTTPException as error:
            response = _line(str(error.description), error.code or 500)
        except (UserError, ImageError) as error:
            response = _line(
                f"the image {error}" if isinstance(error, ImageError) else str(error), 400
            )
        except Unavailable as error:
            response = _line(str(error), 503)
            response.headers["Retry-After"] = "2"
        except Exception:  # a fault of ours: the page stays alive, the terminal has the traceback
            traceback.print_exc(file=sys.stderr)
            response = _line("this failed, by a fault of the explorer; its terminal says more", 500)
        response.headers.extend(HEADERS)
        return response(environ, start_response)

    def _admit(self, request: Request) -> Response | None:
        """Nothing, or what a browser gets that may not ask, or that brings the token. Raises
        HTTPException.
        """
        origin = request.headers.get("Origin")
        site = request.headers.get("Sec-Fetch-Site", "none")
        foreign = origin is not None and origin.partition("://")[2] != request.headers.get("Host")
        if foreign or (request.path != "/" and site not in ("same-origin", "none")):
            raise Forbidden("another page may not ask the explorer")
        if self.token is None:
            if _host_name(request) not in LOOPBACK:
                raise Forbidden(
                    "the explorer answers to localhost only; start it with --host to open it to others"
                )
            return None
        # a browser's cookies know no ports
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
        ask = self._asks.get(request.path) or self._takes.get(request.path)
        method = "POST" if request.path in self._takes else "GET"
        if (static or ask) and request.method != method:
            raise MethodNotAllowed([method], f"this is asked with {method}")
        if static:
            return Response(static[0], content_type=f"{static[1]}; charset=utf-8")
        if not ask:
            raise NotFound("there is nothing here")
        answer = ask(Asked(request, self.runs))
        if isinstance(answer, str):
            return Response(
                answer.encode(errors="replace"), content_type="text/html; charset=utf-8"
            )
        return Response(json.dumps(answer, allow_nan=False), content_type="application/json")

    # --- what is asked; all that needs a model runs in its thread

    def _of(
        self, task: str, answer: Callable[..., Answer], *questions: Callable[[Asked, Shown], object]
    ) -> Callable[[Asked], Answer]:
        """An answer of a run of a task and of what else is asked."""

        def ask(asked: Asked) -> Answer:
            shown = asked.run(task)
            given = [question(asked, shown) for question in questions]
            return self.worker.run(lambda: answer(shown, *given))

        return ask

    def _history(self, asked: Asked) -> Answer:
        samples = asked.run().files().samples
        if not samples:
            raise UserError("this run has kept no samples")
        path = samples[asked.number("place", 0, len(samples) - 1)]
        return {**picture(path, f"step {number(int(path.stem.removeprefix('step-')))}")}


def _line(text: str, status: int) -> Response:
    return Response(
        printable(" ".join(text.split())), status, content_type="text/plain; charset=utf-8"
    )


def _same(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _host_name(request: Request) -> str | None:
    try:
        return urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        return None
