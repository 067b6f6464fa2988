"""torch.compile for phases with one backward pass.

Penalties, and losses whose gradients are taken apart, run the module itself: compiled graphs have no second derivative
and give their buffers away, so that `retain_graph` raises.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._dynamo.exc import TorchDynamoException

from duetgan.utils.runlog.run_log import say_main

CompileSetting = Literal["auto", "on", "off"]


class Compiled:
    """`function`, compiled at its first call; itself where compiling is off (auto: on CPUs) or fails, with one line."""

    def __init__(
        self, function: Callable[..., Any], name: str, *, setting: CompileSetting, device: torch.device
    ) -> None:
        self.function, self.name = function, name
        self._trying = setting == "on" or (setting == "auto" and device.type != "cpu")
        self._run = torch.compile(function, dynamic=False) if self._trying else function

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            result = self._run(*arguments, **options)
        except TorchDynamoException as error:  # InductorError is one of them
            if not self._trying:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            say_main(f"compile: {self.name} runs uncompiled ({reason[:160]})")
            self._run = self.function
            result = self._run(*arguments, **options)
        self._trying = False  # it works, or never will: later errors are not the compiler's
        return result
