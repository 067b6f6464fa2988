"""Which packages are installed; all else is in pyproject.toml. Nothing but `duet` is importable afterwards."""

from setuptools import find_packages, setup

OURS = ("data", "explorer", "inference", "metrics", "models", "planning", "reporting", "studies", "training", "utils")
packages = find_packages(include=[pattern for name in OURS for pattern in (name, f"{name}.*")])
setup(packages=["duet", "duet.app", *(f"duet.app.{name}" for name in packages)])
