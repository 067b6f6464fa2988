"""Which folders are installed, all below the one name `duetgan`; all else is in pyproject.toml."""

from setuptools import find_packages, setup

OURS = ("data", "explorer", "inference", "metrics", "models", "planning", "reporting", "studies", "training", "utils")
packages = find_packages(include=[pattern for name in OURS for pattern in (name, f"{name}.*")])
setup(
    packages=["duetgan", "duetgan.scripts", "duetgan.scripts.configs", *(f"duetgan.{name}" for name in packages)],
    package_dir={
        "duetgan.scripts": ".",
        "duetgan.scripts.configs": "configs",
        **{f"duetgan.{name}": name for name in OURS},
    },
)
