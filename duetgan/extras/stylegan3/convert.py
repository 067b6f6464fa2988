"""Convert StyleGAN3's generators from the files of NVIDIA's program stylegan3."""

import torch

from duetgan.extras.official.names import Place, Source, renamed
from duetgan.extras.official.nvidia import (
    GENERATORS,
    Arguments,
    GeneratorForm,
    image_shape,
    mapping_arguments,
    size_arguments,
)
from duetgan.extras.official.unpickle import Refused
from duetgan.extras.stylegan3 import networks
from duetgan.utils.config.build import build
from duetgan.utils.errors import UserError, explained

NAMES = {  # our names -> NVIDIA's, without the layers
    "w_avg": "mapping.w_avg",
    r"mapping\.layers\.(.+)": r"mapping.fc\1",
    r"input\.(.+)": r"synthesis.input.\1",
}


def read(arguments: Arguments) -> GeneratorForm:
    """Return our counterpart of a generator that NVIDIA's program built with `arguments`.

    Raises Refused for arguments of networks that Duet does not have.
    """
    shape = image_shape(arguments)
    radial = bool(arguments.take("use_radial_filters", False))
    config = mapping_arguments(arguments, layers=2, beta=0.998) | size_arguments(arguments)
    config |= {
        "layers": arguments.number("num_layers", 14),
        "critical_layers": arguments.number("num_critical", 2),
        "margin": arguments.number("margin_size", 10),
        "conv_kernel": arguments.number("conv_kernel", 3),
        "radial_filters": radial,
        "magnitude_ema_beta": arguments.take("magnitude_ema_beta", 0.999),
    }
    arguments.require(
        first_cutoff=[networks.FIRST_CUTOFF],
        first_stopband=[networks.FIRST_STOPBAND],
        last_stopband_rel=[networks.LAST_STOPBAND],
        output_scale=[networks.OUTPUT_SCALE],
        filter_size=[networks.FILTER_TAPS],
        lrelu_upsampling=[networks.OVERSAMPLING],
    )
    arguments.done()
    with explained(UserError, lambda error: Refused(str(error))):
        generator = build(networks.GeneratorTConfig, config, source="the generator's arguments")
        outputs = networks.signals(generator, shape["resolution"], shape["channels"])
    layers = [f"synthesis.L{i}_{y.size}_{y.channels}" for i, y in enumerate(outputs)]

    def place(name: str) -> Place:
        head, _, tail = name.partition(".")
        if head != "layers":
            return Place(renamed(name, NAMES))
        number, _, tensor = tail.partition(".")
        return Place(f"{layers[int(number)]}.{tensor}")

    def drop_filters(source: Source) -> None:
        last_radial = generator.layers - generator.critical_layers
        for number, layer in enumerate(layers[:-1]):
            signal = outputs[max(0, number - 1)], outputs[number]
            filters = networks.design_filters(*signal, radial=radial and number < last_radial)
            for name, (_, designed) in zip(("up_filter", "down_filter"), filters, strict=True):
                value = source.take(f"{layer}.{name}")
                if value.shape != designed.shape or not torch.allclose(
                    value, torch.from_numpy(designed).float(), atol=1e-5
                ):
                    raise Refused(f"{source.title}'s {layer}.{name} differs from Duet's filter")

    return GeneratorForm(
        architecture="stylegan3-r" if radial else "stylegan3-t",
        config=config,
        shape=shape,
        place=place,
        drop_filters=drop_filters,
    )


GENERATORS["synthesis.input.freqs"] = read
