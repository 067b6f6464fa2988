"""Going back: a profile and a search of the learning rate train for a few steps and undo them."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class Rewind:
    """The state at one moment, kept in main memory, to go back to. `registry`: name -> state_dict, load_state_dict."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry
        state = {name: part.state_dict() for name, part in registry.items()}
        self._state = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self.bytes = sum(leaf.nbytes for leaf in tree_leaves(self._state) if isinstance(leaf, torch.Tensor))

    def rewind(self) -> None:
        """Go back. A copy is loaded: what is loaded may be kept, and trained on."""
        for name, part in self._registry.items():
            part.load_state_dict(copy.deepcopy(self._state[name]))
            if isinstance(part, torch.nn.Module):
                part.zero_grad(set_to_none=True)
