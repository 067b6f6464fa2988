"""torch.compile for phases with one backward pass.

Penalties, and losses whose gradients are taken apart, run the module itself: compiled graphs have
no second derivative and give their buffers away, so that `retain_graph` raises.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from duetgan.utils.runlog.run_log import say_main

CompileSetting = Literal["auto", "on", "off"]
# of a function, at most; torch's own limit is 8, but growth alone needs two for every stage and use
GRAPHS = 64


class Compiled:
    """`function`, compiled at its first call; itself where compiling is off (auto: on CPUs) or
    fails, with one line.

    Each shape and each number it is called with has a graph of its own; what changes often comes as
    a tensor.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        setting: CompileSetting,
        device: torch.device,
    ) -> None:
        self.function, self.name = function, name
        self.on = setting == "on" or (setting == "auto" and device.type != "cpu")
        if self.on:  # what is beyond the limit would run uncompiled in silence
            torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
            self._run = torch.compile(function, dynamic=False)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.on:
            return self.function(*arguments, **options)
        try:
            return self._run(*arguments, **options)
        except (
            torch._dynamo.exc.TorchDynamoException
        ) as error:  # InductorError too; a later shape may raise it
            lines = (str(error).strip() or type(error).__name__).splitlines()
            # "backend='inductor' raised:"
            reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
            say_main(f"compile: {self.name} runs uncompiled ({reason[:300]})")
            self.on = False
        return self.function(*arguments, **options)
