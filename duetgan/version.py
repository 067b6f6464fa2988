"""The version of Duet, as in pyproject.toml."""

__version__ = "0.1.0"
