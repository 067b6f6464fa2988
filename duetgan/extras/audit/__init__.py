"""Membership inference on a GAN: do its samples reveal training images? (docs/extras/audit.md)"""

ATTACHES = {"duetgan.commands.evaluate": "duetgan.extras.audit.option"}
