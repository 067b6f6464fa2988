"""Research tools and rarely used features beside the core (docs/extras).

Nothing outside this folder imports it, and each package in it can be deleted. A package's
`__init__` imports nothing and says where the package attaches:

- COMMANDS: commands of `duet`, each with its module and its line in `duet --help`;
- ATTACHES: a module of the core with a registry -> the package's module that adds entries to it;
- NEEDS: names of other extras; without them the package is not attached.
"""
