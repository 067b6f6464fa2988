"""Runs of the tests of inference."""

from tests.inference.conftest import runs, slim_classifiers  # noqa: F401
