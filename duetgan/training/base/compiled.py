"""torch.compile for computations with one backward pass.

Penalties, and losses whose gradients are taken separately, run the module itself: compiled graphs
have no second derivative and free their buffers, so that `retain_graph` raises an error.
"""

from collections.abc import Callable
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

from duetgan.utils.runlog.run_log import say_main

CompileSetting = Literal["auto", "on", "off"]
# largest number of graphs of a function; torch's limit of 8 is too low for progressive growing,
# which needs two for every stage and use
GRAPHS = 64
P = ParamSpec("P")
R = TypeVar("R")


class Compiled(Generic[P, R]):
    """`function`, compiled at its first call.

    It runs uncompiled where compilation is off ("auto" compiles on accelerators only), and after
    compilation has failed, which prints one line. Every shape and every Python number among the
    arguments has a graph of its own; pass values that change often as tensors.
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
        self.on = setting == "on" or (setting == "auto" and device.type != "cpu")
        if self.on:  # beyond the limit torch runs a function uncompiled without a message
            torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
            self._run = torch.compile(function, dynamic=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.on:
            return self.function(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        # the base class of InductorError too; a later shape may raise it
        except torch._dynamo.exc.TorchDynamoException as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            # the first line may only be "backend='inductor' raised:"
            reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
            say_main(f"compile: {self.name} runs uncompiled ({reason[:300]})")
            self.on = False
        return self.function(*args, **kwargs)
