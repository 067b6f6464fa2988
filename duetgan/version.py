"""Define the version of Duet. pyproject.toml has the same."""

__version__ = "0.1.0"
