"""The explorer (`duet explore`): a page in the browser that shows models and runs."""

COMMANDS = {"explore": ("duetgan.extras.explorer.command", "explore models in a browser")}
NEEDS = ("editing",)  # another extra
