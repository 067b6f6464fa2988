"""What is made from a checkpoint."""

import duetgan.utils  # noqa: F401  # hears Ctrl-C while the rest is imported
