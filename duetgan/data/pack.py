"""Pack images into one file: `python -m data.pack` is the command `duet pack`."""

from duetgan.commands import run

if __name__ == "__main__":
    run("pack")
