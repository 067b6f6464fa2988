"""Runs of the tests of inference."""

from tests.inference.conftest import no_weights, slim_classifiers  # noqa: F401
