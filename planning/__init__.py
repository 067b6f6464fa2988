"""What the quickstart decides before it starts: it looks at the images, measures the machine, chooses and says why."""

import duetgan.utils  # noqa: F401  # hears Ctrl-C while the rest is imported
