"""Describe a packed file: `python -m data.inspect` is the command `duet inspect`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("inspect")
