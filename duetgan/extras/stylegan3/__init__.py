"""StyleGAN3's alias-free generators (2106.12423): the architectures stylegan3-t and stylegan3-r,
NVIDIA's files of them, and `generate.py move`, films in which the image moves and turns.
"""

ATTACHES = {
    "duetgan.commands.generate": "duetgan.extras.stylegan3.generate",
    "duetgan.extras.official.nvidia": "duetgan.extras.stylegan3.convert",
    "duetgan.models.registry": "duetgan.extras.stylegan3.architectures",
}
NEEDS = ("official",)  # the reader of NVIDIA's files
