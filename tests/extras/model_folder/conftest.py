"""Runs of the tests of inference."""

from tests.inference.conftest import checkpoint, runs, slim_classifiers  # noqa: F401
