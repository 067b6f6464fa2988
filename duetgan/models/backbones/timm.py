"""Networks of the timm library, named `timm:NAME`; they need timm to be installed."""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from duetgan.models.backbones.base import Backbone
from duetgan.utils.errors import UserError, explained
from duetgan.utils.text import did_you_mean

PREFIX = "timm:"


class TimmBackbone(Backbone):
    """Backbone of a timm network, made from timm's description (`group_matcher`, `pretrained_cfg`).

    timm does not describe the order in which modules are called, so stages cannot run one by one.
    """

    def block_of(self, network: Any) -> dict[str, str]:
        """Return a dict from parameter name to block name, ordered from images to logits."""
        group = importlib.import_module("timm.models").group_parameters
        stages = group(network, network.group_matcher(coarse=True), reverse=True)
        blocks = group(network, network.group_matcher(coarse=False), reverse=True)
        head = f"{self.head}."

        def position(name: str) -> tuple[bool, int, int]:
            return name.startswith(head), stages[name], blocks[name]

        block_of = {}
        for name in sorted(stages, key=position):
            block = f"stage{stages[name]}.{blocks[name]}" if stages[name] else "stem"
            block_of[name] = "head" if name.startswith(head) else block
        return block_of

    def features(
        self, network: Any, x: Tensor, _run: object, begin: int = 0, end: int | None = None
    ) -> Tensor:
        """Return the features [N, F] of images `x`.

        If `begin` is not 0, `x` are the features already, and they are returned.
        """
        return x if begin else network.forward_head(network.forward_features(x), pre_logits=True)


@functools.cache
def timm_backbone(name: str) -> TimmBackbone:
    """Return the description of the network `name`, which has the form `timm:NAME`.

    Raises UserError if timm is not installed, if timm does not know or describe the network, and if
    the network's head is not a single linear layer.
    """
    with torch.device("meta"):
        network = _create(name)
    config = network.pretrained_cfg
    side = config["input_size"][-1]
    first = config.get("first_conv")
    head = config.get("classifier")
    maps = getattr(network, "feature_info", [{}])[-1]
    is_described = (
        isinstance(first, str)
        and isinstance(head, str)
        and hasattr(network, "group_matcher")
        and isinstance(network.get_submodule(head), nn.Linear)
        and "module" in maps
    )
    if not is_described:
        raise UserError(
            f"model {name}: timm does not describe its stages, or it has no linear head; "
            "choose another"
        )
    repository = config.get("hf_hub_id")

    def files(_name: str) -> dict[str, str]:
        if not repository:
            return {}
        hub = importlib.import_module("huggingface_hub")  # which timm installs
        return {"DEFAULT": hub.hf_hub_url(repository, "model.safetensors")}

    return TimmBackbone(
        names=(name,),
        network=lambda name, channels: _create(name, in_chans=channels),
        files=files,
        stages={},
        pool=(),
        stems=False,
        in_turn=False,
        first=first,
        head=head,
        maps=maps["module"],
        side=side if config.get("fixed_input_size") else None,
        images=(
            side,
            int(side / config.get("crop_pct", 1)),
            config.get("interpolation", "bicubic"),
        ),
        mean=config["mean"],
        std=config["std"],
    )


def _create(name: str, **options: Any) -> Any:
    not_installed = "model {} needs timm ({}); `pip install timm`, or choose another model"
    with explained(ImportError, lambda error: not_installed.format(name, error)):
        timm = importlib.import_module("timm")
    timm_name = name.removeprefix(PREFIX)

    def unknown(error: Exception) -> str:
        hint = did_you_mean(timm_name, timm.list_models())
        return f"model {name}: timm has no such network{hint} ({error})"

    with explained((RuntimeError, ValueError), unknown):
        return timm.create_model(timm_name, num_classes=2, **options)
