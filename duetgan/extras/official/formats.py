"""Register the format `nvidia`, for NVIDIA's StyleGAN2, with export.py."""

from duetgan.inference.export.formats import FORMATS, Format

FORMATS["nvidia"] = Format(
    module="duetgan.extras.official.nvidia_export",
    help="StyleGAN2's weights by NVIDIA's names",
    limit=0.0,
    task="gan",
    suffix=".safetensors",  # by which `convert.read` recognises the format
)
