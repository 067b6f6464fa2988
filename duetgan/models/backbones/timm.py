"""timm's networks, as `timm:NAME`, where timm is installed."""

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
    """A network as timm describes it (`group_matcher`, `pretrained_cfg`); the order of its calls is
    not known.
    """

    def block_of(self, network: Any) -> dict[str, str]:
        group = importlib.import_module("timm.models").group_parameters
        stages, blocks = (
            group(network, network.group_matcher(coarse=c), reverse=True) for c in (True, False)
        )
        found = {}
        for name in sorted(
            stages, key=lambda name: (name.startswith(f"{self.head}."), stages[name], blocks[name])
        ):
            block = f"stage{stages[name]}.{blocks[name]}" if stages[name] else "stem"
            found[name] = "head" if name.startswith(f"{self.head}.") else block
        return found

    def features(
        self, network: Any, x: Tensor, _run: object, begin: int = 0, end: int | None = None
    ) -> Tensor:
        return x if begin else network.forward_head(network.forward_features(x), pre_logits=True)


@functools.cache
def timm_backbone(name: str) -> TimmBackbone:
    """The description of `timm:NAME`. Raises UserError without timm, for an unknown name, and for a
    network that timm does not describe or that has no single linear head.
    """
    with torch.device("meta"):
        network = _create(name)
    about = network.pretrained_cfg
    side = about["input_size"][-1]
    first, head, maps = (
        about.get("first_conv"),
        about.get("classifier"),
        getattr(network, "feature_info", [{}])[-1],
    )
    known = isinstance(first, str) and isinstance(head, str) and hasattr(network, "group_matcher")
    if not (known and isinstance(network.get_submodule(head), nn.Linear) and "module" in maps):
        raise UserError(
            f"model {name}: timm does not describe its stages, or it has no linear head; choose another"
        )
    # timm needs it
    hub, repository = importlib.import_module("huggingface_hub"), about.get("hf_hub_id")
    return TimmBackbone(
        names=(name,),
        network=lambda name, channels: _create(name, in_chans=channels),
        files=lambda _: (
            {"DEFAULT": hub.hf_hub_url(repository, "model.safetensors")} if repository else {}
        ),
        stages={},
        pool=(),
        stems=False,
        in_turn=False,
        first=first,
        head=head,
        maps=maps["module"],
        side=side if about.get("fixed_input_size") else None,
        images=(side, int(side / about.get("crop_pct", 1)), about.get("interpolation", "bicubic")),
        mean=about["mean"],
        std=about["std"],
    )


def _create(name: str, **options: Any) -> Any:
    lacking = "model {} needs timm ({}); `pip install timm`, or choose another model"
    with explained(ImportError, lambda why: lacking.format(name, why)):
        timm = importlib.import_module("timm")
    plain = name.removeprefix(PREFIX)

    def unknown(why: Exception) -> str:
        return f"model {name}: timm has no such network{did_you_mean(plain, timm.list_models())} ({why})"

    with explained((RuntimeError, ValueError), unknown):
        return timm.create_model(plain, num_classes=2, **options)
