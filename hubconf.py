"""Entry points for torch.hub: `torch.hub.load("path/to/duet", "resnet_classifier", source="local",
checkpoint=...)`.
"""

from duetgan.hub import dcgan, dependencies, r3gan, resnet_classifier, stylegan2

__all__ = ["dcgan", "dependencies", "r3gan", "resnet_classifier", "stylegan2"]
