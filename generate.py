"""Draw images, films and data sets with a generator: `python generate.py grid --checkpoint runs/gan
--out grid.png`.
"""

from duetgan.commands import run

if __name__ == "__main__":
    run("generate")
