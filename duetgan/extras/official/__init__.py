"""Networks of other programs, which `duet convert` reads."""

COMMANDS = {
    "convert": ("duetgan.extras.official.convert", "convert StyleGAN checkpoints of other programs")
}
