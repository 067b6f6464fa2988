"""Read and write networks of other programs.

`duet convert` reads them; `export.py --format nvidia` writes networks for NVIDIA's program.
"""

COMMANDS = {
    "convert": ("duetgan.extras.official.convert", "convert StyleGAN checkpoints of other programs")
}
ATTACHES = {"duetgan.inference.export.formats": "duetgan.extras.official.formats"}
