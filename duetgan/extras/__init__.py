"""Research tools and rarely used features, each in its own package (docs/extras).

The core imports none of these packages, so each one can be deleted. The `__init__` of a package
imports nothing. It declares:

- COMMANDS: a dict from the name of a `duet` command to its module and its line in `duet --help`;
- ATTACHES: a dict from a module that has a registry to a module of the package that adds entries to
  this registry (duetgan/utils/extras.py);
- NEEDS: the names of other extras. If one of them is missing, the package is not used.
"""
