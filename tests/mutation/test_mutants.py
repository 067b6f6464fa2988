"""The mutants of small sources, the sample, and the order of a mutant's tests."""

import random

import pytest

from tests.mutation.mutants import HAND_OVER, mutants_of, sample
from tests.mutation.recording import Recording
from tests.mutation.runner import order

SIGNATURES = """
class Settings:
    steps: int = 3
    images: int = 4
    name: str = ""

def act(first, second=2, *, third=3): ...
"""


def changes(tmp_path, source):
    """Return (kind, changed source) of every mutant of a source of one statement."""
    (tmp_path / "signatures.py").write_text(SIGNATURES)
    path = tmp_path / "source.py"
    path.write_text(source)
    mutants = [m for m in mutants_of(tmp_path, ["source.py"], ["signatures.py"]) if m.is_valid(path.read_bytes())]
    assert all(m.first_line == 1 for m in mutants)
    return {(m.kind, m.apply(path.read_bytes()).decode().strip()) for m in mutants}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a + b", {("arithmetic", "x = (a - b)")}),
        ("x = 'a' + b", set()),
        ("x -= a", {("removed statement", "pass"), ("arithmetic", "x += a")}),
        ("x = a < b", {("boundary", "x = (a <= b)"), ("comparison", "x = (a >= b)")}),
        ("x = a < 0.5", {("comparison", "x = (a >= 0.5)"), ("constant", "x = a < 1.0")}),
        ("x = 3", {("constant", "x = 4")}),
        ("x = a and b", {("negated condition", "x = (a or b)")}),
        ("x = a if b else c", {("negated condition", "x = (a if not b else c)")}),
        ("act(a, third=b)", {("removed statement", "pass"), ("drop keyword", "(act(a))")}),
        ("x = act(a, third=3)", {("constant", "x = act(a, third=4)")}),  # its default
        ("x = act(a, b)", {("drop argument", "x = (act(a))"), ("swap arguments", "x = (act(b, a))")}),
        ("x = max(a, b)", set()),
        ("x = call(a, strict=b)", set()),
        ("x = a.steps", {("other attribute", "x = (a.images)")}),
        ("x = a.detach()", {("removed detach", "x = a")}),
        ("x = f'{a + 1:.2f}'", set()),
        ("raise Error(a + 1)", set()),
    ],
)  # fmt: skip
def test_changes(tmp_path, source, expected):
    assert changes(tmp_path, source) == expected


def test_sample_is_half_hand_over_and_depends_on_the_seed(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "source.py").write_text("x = a + b\ny = call(one=a, two=b)\n" * 50)
    mutants = mutants_of(tmp_path, ["a/source.py", "b/source.py"])

    def draw(seed):
        drawn = list(mutants)
        random.Random(0).shuffle(drawn)
        return sample(drawn, 40, seed, lambda path: path[0], lambda mutant: mutant.kind != "drop keyword")

    chosen = draw(1)
    assert len(chosen) == len({(m.path, m.start, m.text) for m in chosen}) == 40
    assert sum(m.kind in HAND_OVER for m in chosen) == 20
    assert sum(m.path[0] == "a" for m in chosen) == 20
    assert {m.kind for m in chosen} == {"arithmetic", "swap arguments"}
    assert draw(1) == chosen != draw(2)


def test_tests_of_a_line_and_their_order():
    recording = Recording(imported={"data/x.py": 0b10})
    for test, seconds, mask in (("a::1", 1, 0b100), ("data/test_x::2", 5, 0b100), ("data/test_x::3", 2, 0b1100)):
        name = f"tests/{test}"
        recording.seconds[name] = seconds
        recording.lines["data/x.py"][name] = mask
    assert recording.tests_of("data/x.py", 3, 3) == ["tests/data/test_x::3"]
    tests = recording.tests_of("data/x.py", 1, 1)  # run on import: every test that executes the file
    assert len(tests) == 3
    assert order(tests, "data/x.py", recording, 100) == ["tests/data/test_x::3", "tests/data/test_x::2", "tests/a::1"]
    assert order(tests, "data/x.py", recording, 3) == ["tests/data/test_x::3", "tests/a::1"]
    recording.seconds |= {"tests/data/test_x::4": 2.5, "tests/b::5": 3}
    tests += ["tests/data/test_x::4", "tests/b::5"]  # a file's quarter is 4 s, the last test fills what is left
    chosen = ["tests/data/test_x::3", "tests/a::1", "tests/b::5", "tests/data/test_x::4", "tests/data/test_x::2"]
    assert order(tests, "data/x.py", recording, 16) == chosen
