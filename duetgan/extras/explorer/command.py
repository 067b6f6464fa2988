"""Explore models in a browser.

The page shows samples, edits, and predictions with their evidence.
"""

import logging
import secrets
import signal
import socket
import sys

from duetgan.utils import files
from duetgan.utils.config.cli import Parser, add_import_option, number
from duetgan.utils.distributed.process import leave_threads
from duetgan.utils.errors import EXIT_OK, explained

PORT = 7870
CONNECTIONS = 50
THREADS = 16  # more than the models' queue holds, so that the page itself always loads


def parser() -> Parser:
    options = Parser(prog="duet explore", description=__doc__)
    add_import_option(options)
    add = options.add_argument
    text = "run folder, checkpoint, or a folder of runs; may be repeated (default: runs/quickstart)"
    add("--checkpoint", action="append", default=[], metavar="RUN", help=text)
    add(
        "--which",
        choices=("last", "best"),
        default="last",
        help="checkpoint of a run folder: the last one, or the one with the best evaluation "
        "(default: last)",
    )
    add("--device", help="cpu, cuda or cuda:N (default: the accelerator if there is one)")
    text = "address to listen on; 0.0.0.0: reachable from other machines (default: 127.0.0.1)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    add("--port", type=number(int, 0, 65535), default=PORT, metavar="N", help="0: any free port")
    return options


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    with explained(ImportError, "the explorer needs waitress; `pip install 'waitress>=3.0'`"):
        from waitress.server import create_server
    with listen(options.host, options.port) as listener:  # before the slow import of torch
        from duetgan.extras.explorer.app import App
        from duetgan.extras.explorer.models import open_runs
        from duetgan.utils.distributed.collectives import choose_device

        address, port = listener.getsockname()[:2]
        token = secrets.token_urlsafe(16)
        runs = open_runs(
            options.checkpoint, which=options.which, device=choose_device(options.device)
        )
        app = App(runs, token=token)
        server = create_server(
            app,
            sockets=[listener],
            threads=THREADS,
            connection_limit=CONNECTIONS,
            max_request_body_size=files.UPLOAD.limit + 1,
            ident=None,
        )

        # waitress would print a warning for each request that waits for a thread.
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        host = f"[{address}]" if ":" in address else address
        if address in ("0.0.0.0", "::"):
            host = socket.gethostname()
        place = f"http://{host}:{port}/?token={token}"
        print(f"open {place} in a browser; Ctrl-C ends the explorer", flush=True)
        leave_threads()  # a model may still be computing when the program ends
        server.run()  # returns at a KeyboardInterrupt
    print("ended", file=sys.stderr)
    return EXIT_OK


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`. Raises UserError if that is impossible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    prefix = f"--host {host} --port {port}"
    with explained(
        (OSError, UnicodeError),
        lambda error: (
            f"{prefix}: {getattr(error, 'strerror', None) or error}; give another address or port"
        ),
    ):
        return socket.create_server((host, port), family=family)
