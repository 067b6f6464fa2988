"""The architectures stylegan3-t and stylegan3-r, with StyleGAN2's discriminator."""

from duetgan.extras.stylegan3.networks import GeneratorRConfig, GeneratorTConfig, Stylegan3Generator
from duetgan.models.registry import ARCHITECTURES, Architecture
from duetgan.models.stylegan2 import Discriminator, DiscriminatorConfig
from duetgan.utils.config.yaml_files import Tree

RECIPE: dict[str, Tree] = {  # defaults of the training config
    "loss": {"style_mixing": 0.0},
    "discriminator": {"channel_base": 32768, "clamp_always": True},
    "discriminator_optimizer": {"lr": 0.002, "betas": [0.0, 0.99]},
}
for _name, _config in (("t", GeneratorTConfig), ("r", GeneratorRConfig)):
    ARCHITECTURES[f"stylegan3-{_name}"] = Architecture(
        _config, Stylegan3Generator, DiscriminatorConfig, Discriminator, RECIPE
    )
