"""Train and evaluate both models on the embedded sample or on your own images: `python
quickstart.py photos/`.
"""

from duetgan.commands import run

if __name__ == "__main__":
    run("quickstart")
