"""Records the files that a process opens where tests have no business: runs/, the home folder, the user's caches.

It is on the path of all processes that the tests start, so that Python imports it first, and `tests.conftest` imports
it for the tests' own. An audit hook does the work; it changes nothing and costs three microseconds an opened file. What
Python does not open (a library in C, git) it does not see: `tests.watch.isolation` compares names, before and after.
"""

import os
import sys

FOLDER = "DUET_TESTS"  # the environment's variable for the folder of the rules, the records and the tests' home
RULES, RECORDS = "rules", "records"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # event -> the arguments that are changed paths, and the one that is a folder's descriptor
    "os.mkdir": ((0,), 2),
    "os.remove": ((0,), 1),
    "os.rename": ((0, 1), 2),
    "os.rmdir": ((0,), 1),
    "os.symlink": ((1,), 2),
    "os.link": ((1,), 3),
}
EVENTS = frozenset(("open", "os.listdir", "os.scandir", *CHANGES))


class Watch:
    """The rules of a session of tests: the longest folder that a path lies in says what may be done there."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with open(os.path.join(folder, RULES)) as file:
            lines = [line.rstrip("\n").partition("\t") for line in file]
        self.rules = [(path.rstrip("/") + "/", rights) for rights, _, path in lines]
        self.rules.sort(key=lambda rule: len(rule[0]), reverse=True)

    def allows(self, path: str, right: str) -> bool:
        """Return whether `path`, absolute, may be read ("r") or written ("w"): without a rule it may be read."""
        for folder, rights in self.rules:
            if path.startswith(folder) or path == folder[:-1]:
                return right in rights or "__pycache__" in path
        return right == "r"

    def check(self, name: int | str | bytes | None, right: str) -> None:
        """Record a path that must not be used so."""
        if isinstance(name, int):
            return
        path = os.path.abspath(os.fsdecode(name if name is not None else "."))
        if self.allows(path, right):
            return
        words = [os.environ.get("PYTEST_CURRENT_TEST", "no test"), "writes" if right == "w" else "reads", path]
        line = " ".join([*words, "in", *sys.argv[:2]]).replace("\n", " ")
        with open(records(self.folder), "ab") as file:
            file.write(os.fsencode(f"{line}\n"))

    def opened(self, arguments: tuple) -> None:
        """Check a file that is opened."""
        name, mode, flags = arguments
        right = "w" if flags & WRITING else "r"
        # os.open, as shutil.rmtree calls it: relative to a folder whose descriptor is not among the arguments
        if mode is not None or right == "w" or os.path.isabs(name):
            self.check(name, right)

    def changed(self, paths: tuple[int, ...], descriptor: int, arguments: tuple) -> None:
        """Check what is made, moved or removed."""
        if arguments[descriptor] == -1:
            for number in paths:
                self.check(arguments[number], "w")


def records(folder: str) -> str:
    """Return the file of a session's records: one for each of pytest-xdist's processes and their children."""
    return os.path.join(folder, f"{RECORDS}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")


def install() -> None:
    """Watch this process from now on."""
    watch = Watch(os.environ[FOLDER])

    def hook(event: str, arguments: tuple) -> None:
        if event not in EVENTS:  # nearly all of them
            return
        try:
            if event == "open":
                watch.opened(arguments)
            elif event in CHANGES:
                watch.changed(*CHANGES[event], arguments)
            else:
                watch.check(arguments[0], "r")
        except (OSError, TypeError, ValueError):  # a folder that is gone, or no path: the call itself says so
            return

    sys.addaudithook(hook)


if os.path.isfile(os.path.join(os.environ.get(FOLDER, ""), RULES)):
    install()
