"""A classifier's layers as a table: `train.py --dry-run`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from training.classifier.finetune import FineTuning, plain
from training.optim.config import OptimizerConfig
from utils.text import columns

HEADINGS = ("layer", "kind", "output", "parameters", "peak lr", "weight decay", "trains")


def layer_table(network: nn.Module, inputs: tuple[Any, ...], finetuning: FineTuning, config: OptimizerConfig) -> str:
    """Every layer in the order of the forward pass: output shape, parameters, rate at the peak, weight decay, and from
    which update it trains. `network` is in evaluation mode, its parameters named as those of `finetuning`.
    """
    shapes: dict[str, str] = {}
    modules = {prefix: module for prefix, module in network.named_modules() if not any(True for _ in module.children())}

    def note(prefix: str, output: Tensor) -> None:
        shapes.setdefault(prefix, " x ".join(map(str, output.shape)))

    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output, prefix=prefix: note(prefix, output))
        for prefix, module in modules.items()
    ]
    with torch.no_grad():
        network(*inputs)
    for hook in hooks:
        hook.remove()
    rows = [_layer_row(prefix, shapes[prefix], modules[prefix], finetuning, config) for prefix in shapes]
    ever = sum(p.numel() for name, p in finetuning.parameters.items() if finetuning.begins[name] is not None)
    total = sum(p.numel() for p in finetuning.parameters.values())
    totals = (("Total", total), ("Trainable", ever), ("Non-trainable", total - ever))
    layers = columns([HEADINGS, *rows], "<")
    return "\n".join([layers, *(f"{label} params: {count:,}" for label, count in totals)])


def _layer_row(
    prefix: str, shape: str, module: nn.Module, finetuning: FineTuning, config: OptimizerConfig
) -> tuple[str, ...]:
    """Values that differ between a layer's parameters, one for each, in their order."""
    names = {f"{prefix}.{name}": p for name, p in module.named_parameters(recurse=False)}
    kind = type(module).__name__
    if not names:
        return plain(prefix), kind, shape, "", "", "", ""
    cells = []
    for name, parameter in names.items():
        begin = finetuning.begins[name]
        rate, decay = config.lr * finetuning.factors[name], config.weight_decay if parameter.ndim > 1 else 0
        trains = "no" if begin is None else f"from step {begin}" if begin else "yes"
        trains += ", statistics kept" * (finetuning.config.freeze_bn and isinstance(module, _BatchNorm))
        cells.append(("-", "-", trains) if begin is None else (f"{rate:.3g}", f"{decay:g}", trains))
    count = f"{sum(p.numel() for p in names.values()):,}"
    return plain(prefix), kind, shape, count, *("/".join(dict.fromkeys(column)) for column in zip(*cells, strict=True))
