"""A pytest plugin that records which test executes which line, in child processes too.

coverage measures every Python process of the run (tests/mutation/recording.py). This plugin names the context: the
test that runs, or the fixture of a module or session that is set up, whose lines count for every test that uses it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

CONTEXT = "DUET_MUTATION_CONTEXT"  # the context of child processes
OUTPUT = "DUET_MUTATION_OUTPUT"  # a folder

_tests: dict[str, dict[str, Any]] = {}


def _switch(context: str) -> None:
    os.environ[CONTEXT] = context
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(context)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _tests[item.nodeid] = {"seconds": 0.0, "passed": True, "fixtures": []}
    _switch(item.nodeid)
    try:
        return (yield)
    finally:
        _switch("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    if fixturedef.scope == "function":
        return (yield)
    before = os.environ.get(CONTEXT, "")
    _switch(_fixture_name(fixturedef))
    try:
        return (yield)
    finally:
        _switch(before)


def _fixture_name(fixturedef: Any) -> str:
    return f"fixture {fixturedef.baseid}::{fixturedef.argname}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    used = getattr(item, "_request", None)
    definitions = getattr(used, "_fixture_defs", {}).values()
    _tests[item.nodeid]["fixtures"] = sorted({_fixture_name(f) for f in definitions if f.scope != "function"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid in _tests:  # in the process that ran it
        test = _tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] = test["passed"] and not report.failed
        test["skipped"] = test.get("skipped", False) or report.skipped


def pytest_sessionfinish() -> None:
    if _tests:
        Path(os.environ[OUTPUT], f"tests-{os.getpid()}.json").write_text(json.dumps(_tests))
