"""Progress where no bar can be drawn: lines with clock and time left."""

import io
import os
import pty
import re
import sys

from duetgan.utils.runlog import progress
from duetgan.utils.runlog.progress import Bar, has_terminal, showing

LINE = re.compile(r"\d\d:\d\d:\d\d packing: 4 of 12, [\d.]+image/s, \d\d:\d\d left")


def test_lines_come_at_intervals_and_none_for_short_work(capsys, monkeypatch):
    """U16: redirected logs said nothing for minutes."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Bar(total=12, desc="packing", unit="image", mininterval=0, miniters=1) as bar:
        bar.update(3)
        assert capsys.readouterr() == ("", "")
        clock[0] = progress.SECONDS_BETWEEN_LINES + 1
        bar.update(1)
        assert LINE.fullmatch(capsys.readouterr().err.strip())
        bar.update(1)
    assert capsys.readouterr() == ("", "")


def test_iterating_counts_and_closes(capsys):
    bar = Bar([1, 2, 3], "reading", unit="batch")
    assert list(bar) == [1, 2, 3]
    assert bar.n == 3
    assert str(bar).startswith("reading: 3 of 3, ")
    assert capsys.readouterr() == ("", "")
    with Bar(total=12, disable=True) as off:
        off.update(3)
    assert capsys.readouterr() == ("", "")


def test_terminal_without_a_size_gets_lines(monkeypatch):
    """N13: some containers' terminals are 0x0. No stream is none."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", io.StringIO())
        assert not has_terminal()
        patch.setitem(sys.modules, "ipykernel", io)  # a notebook draws bars, though its stderr is no terminal
        assert has_terminal()
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
        assert not has_terminal()
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((80, 24)))
        assert has_terminal()
        with Bar(total=2, desc="packing") as bar:
            bar.update(2)
        shown = b""
        while b"packing: 100%" not in shown:  # a pseudo-terminal gives what it has; pytest's time limit ends this
            shown += os.read(parent, 10_000)
    os.close(parent)


def test_no_bar_is_shown_of_work_in_a_quiet_block():
    with showing(False), showing(True):
        assert Bar().disable
    with showing(True), Bar() as bar:
        assert not bar.disable
