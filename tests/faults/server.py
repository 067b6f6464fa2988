"""Runs commands for the tests, each in a fork of this process: torch, four seconds of every command, is imported once.

Reads a JSON object a line, {"argv": ["train.py", ...], "out": file, "err": file}; answers with the exit code, negative
for a signal. The command sees what it would see in a process of its own.
"""

import gc
import importlib
import json
import os
import sys
import traceback

from duetgan.utils.script import run_cli

MODULES = {
    "train.py": "train",
    "evaluate.py": "evaluate",
    "predict.py": "predict",
    "generate.py": "generate",
    "export.py": "export",
    "data.pack": "duetgan.data.pack",
    "data.inspect": "duetgan.data.inspect",
}


def run(argv: list[str], out: str, err: str) -> int:
    """In the fork: the command's exit code, 1 and a traceback if it raises."""
    for number, path in enumerate((os.devnull, out, err)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags, 0o644), number)
    try:
        code = run_cli(importlib.import_module(MODULES[argv[0]]).main, argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def main() -> None:
    """Serve until stdin is closed."""
    for name in ("duetgan.training.engine.run", *MODULES.values()):
        importlib.import_module(name)
    gc.freeze()  # or every fork would copy the memory of all that was imported when it collects garbage
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(run(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    os._exit(0)  # taking the interpreter apart would take two seconds


if __name__ == "__main__":
    main()
