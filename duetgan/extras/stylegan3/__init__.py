"""StyleGAN3's alias-free generators (2106.12423).

The package adds the architectures stylegan3-t and stylegan3-r, the conversion of their generators
from NVIDIA's files, and `generate.py move`, which writes films in which the image moves and turns.
"""

ATTACHES = {
    "duetgan.commands.generate": "duetgan.extras.stylegan3.generate",
    "duetgan.extras.official.nvidia": "duetgan.extras.stylegan3.convert",
    "duetgan.models.registry": "duetgan.extras.stylegan3.architectures",
}
NEEDS = ("official",)  # the reader of NVIDIA's files
