"""Find duplicates in packed files: `python -m data.duplicates` is the command `duet duplicates`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("duplicates")
