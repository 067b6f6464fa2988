"""Compile functions by torch.compile, if they are differentiated only once.

Penalties and per-loss gradients call the uncompiled module. Penalties need second derivatives,
which compiled graphs do not have. Per-loss gradients need `retain_graph`, which raises an error
because compiled graphs free their buffers.
"""

from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

from duetgan.utils.runlog.run_log import say_main

CompileSetting = Literal["auto", "on", "off"]
# largest number of compiled graphs of a function; torch's limit of 8 is too low for progressive
# growing, which needs two graphs for every stage and call site
GRAPHS = 64
P = ParamSpec("P")
R = TypeVar("R")


def is_compiled(setting: CompileSetting, device: torch.device) -> bool:
    """Return True if functions on a device are compiled with this setting."""
    return setting == "on" or (setting == "auto" and device.type != "cpu")


class Compiled(Generic[P, R]):
    """A callable that compiles `function` at its first call.

    The function runs uncompiled if `setting` is "off", or if it is "auto" on a CPU. If compilation
    fails, one line that contains `name` is printed, and the function runs uncompiled from then on.
    Each new shape or Python number among the arguments compiles another graph, so pass values that
    change often as tensors.
    """

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        *,
        setting: CompileSetting,
        device: torch.device,
    ) -> None:
        self.function = function
        self.name = name
        self.on = is_compiled(setting, device)
        if self.on:  # Beyond its limit of graphs torch runs a function uncompiled, silently.
            torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
            self._run = torch.compile(function, dynamic=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.on:
            return self.function(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        # This includes InductorError. Compiling for a later shape may raise it too.
        except torch._dynamo.exc.TorchDynamoException as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            # The first line may only be "backend='inductor' raised:".
            reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
            say_main(f"compile: {self.name} runs uncompiled ({reason[:300]})")
            self.on = False
        return self.function(*args, **kwargs)
