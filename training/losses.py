"""Losses of the GAN: functions of logits and gradients that know nothing of networks. All return one value a sample
[N].
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def generator_nonsaturating(fake_logits: Tensor) -> Tensor:
    """softplus(-D(G(z))) (Goodfellow et al. 2014, StyleGAN2)."""
    return F.softplus(-fake_logits)


def discriminator_fake(fake_logits: Tensor) -> Tensor:
    """softplus(D(G(z)))."""
    return F.softplus(fake_logits)


def discriminator_real(real_logits: Tensor) -> Tensor:
    """softplus(-D(x))."""
    return F.softplus(-real_logits)


def squared_gradient_norm(logits: Tensor, images: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """R1's ||grad_x D(x)||^2 for each sample [N] (Mescheder et al. 1801.04406), with a graph for the double backward.

    logits [N], images [N, C, H, W] that require gradients; no sample's logit may depend on another's picture but
    through the minibatch statistics, whose cross terms are part of the gradient as in the reference. Under fp16 the
    inner gradient is taken of `scale` times the logits and unscaled before it is squared.
    """
    (gradient,) = torch.autograd.grad(outputs=(logits * scale).sum(), inputs=images, create_graph=True)
    gradient = gradient.to(logits.dtype) / scale
    return gradient.square().sum(dim=(1, 2, 3))
