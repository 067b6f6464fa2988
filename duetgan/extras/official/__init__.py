"""Networks of other programs: `duet convert` reads them, two formats of export.py write them."""

COMMANDS = {
    "convert": ("duetgan.extras.official.convert", "convert StyleGAN checkpoints of other programs")
}
ATTACHES = {"duetgan.inference.export.formats": "duetgan.extras.official.formats"}
