"""Going back: a profile and a search of the learning rate train for a few steps and undo them."""

import copy
from collections.abc import Mapping
from typing import Any

import torch


class Rewind:
    """The state at one moment, kept in main memory, to go back to. `registry`: name -> state_dict, load_state_dict."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        self._registry = registry
        self.bytes = 0  # of its tensors
        self._state = {name: self._kept(part.state_dict()) for name, part in registry.items()}

    def rewind(self) -> None:
        """Go back. A copy is loaded: what is loaded may be kept, and trained on."""
        for name, part in self._registry.items():
            part.load_state_dict(copy.deepcopy(self._state[name]))
            if isinstance(part, torch.nn.Module):
                part.zero_grad(set_to_none=True)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.bytes += value.numel() * value.element_size()
            return value.detach().to("cpu", copy=True)
        if isinstance(value, Mapping):
            return {key: self._kept(item) for key, item in value.items()}
        return type(value)(map(self._kept, value)) if isinstance(value, (list, tuple)) else value
