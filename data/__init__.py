"""Images to batches."""

import utils  # noqa: F401  # hears Ctrl-C while the rest is imported
