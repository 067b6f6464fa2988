"""The classifier as one process trains it: compiled, and its gradients added up over processes."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from duetgan.models.batchnorm import synchronise_batchnorm
from duetgan.models.classifier import Classifier
from duetgan.training.base.compiled import Compiled, CompileSetting
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import plain
from duetgan.training.classifier.network import widen_narrow_maps
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.collectives import by_kind
from duetgan.utils.distributed.gradients import GradientExchange
from duetgan.utils.errors import UserError


class ClassifierFromStage(nn.Module):
    """A classifier that also takes the outputs of its first `begin` stages in place of images."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor, begin: int) -> Tensor:
        if begin == 0:
            return self.classifier(x)
        return self.classifier.head(self.classifier.features(x, begin=begin))


class Replica:
    """The training's copy of `model` in this process, which shares the model's parameters.

    With several processes DDP adds up the gradients, and BatchNorm is synchronised. With `sync_bn`
    off each process normalises by its own samples instead, and the running statistics are averaged
    after each step. DDP sends gradients in C++, where a CUDA graph cannot be split; if steps are
    captured, `GradientExchange` adds them up.
    """

    def __init__(
        self, model: Classifier, config: ClassifierConfig, device: torch.device, *, captured: bool
    ) -> None:
        self.is_synchronised = config.sync_bn == "auto"
        if collectives.world_size() > 1 and self.is_synchronised:
            synchronise_batchnorm(model, device)
        if device.type == "cpu":
            widen_narrow_maps(model)
        self.model = model.train()  # It stays in training mode: only the average is evaluated.
        self.config = config
        self.device = device
        self.statistics = list(model.buffers())  # running statistics of BatchNorm
        self._ddp: DistributedDataParallel | None = None
        self._exchange: GradientExchange | None = None  # in place of DDP
        self._is_captured = captured
        self._forward: Compiled[..., Tensor] | None = None  # the model or DDP, compiled
        self._trained: list[bool] = []  # `requires_grad` of the parameters in the last `wrap`

    def wrap(self) -> bool:
        """Compile the model, in DDP for several processes, if the trained parameters have changed.

        Return True if they have changed since the last call, and at the first one.
        """
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        if trained == self._trained:
            return False
        is_first = not self._trained
        self._trained = trained
        self._ddp = self._forward = None  # This frees the previous buckets.
        self.model.zero_grad()
        module = ClassifierFromStage(self.model)
        if self._is_captured:
            parameters = self.model.parameters()
            self._exchange = GradientExchange(parameters, compress=self.config.distributed.compress)
        elif collectives.world_size() > 1:
            # Inputs are on the right device already, so no device_ids are needed. Rank 0 sends its
            # weights the first time only, since they are equal on all ranks later.
            self._ddp = DistributedDataParallel(
                module, gradient_as_bucket_view=True, init_sync=is_first
            )
            # BatchNorm is synchronised without DDP. The name of the constructor's option depends
            # on the version of torch.
            self._ddp.broadcast_buffers = False
            if self.config.distributed.compress == "bf16":
                self._ddp.register_comm_hook(None, bf16_compress_hook)
        # A compiled network must be on one device.
        setting: CompileSetting = self.config.compile
        if self.config.model.split != "off":
            setting = "off"
        self._forward = Compiled(
            self._ddp or module, "classifier", setting=setting, device=self.device
        )
        return True

    def __call__(self, x: Tensor, begin: int = 0) -> Tensor:
        """Return the logits [n, classes] of images, or of the outputs of `begin` stages."""
        assert self._forward is not None
        return self._forward(x, begin)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for a micro-batch; the gradients are exchanged in the last one."""
        if self._exchange is not None and last:
            self._exchange.overlap()
        if self._ddp is None or last:
            return nullcontext()
        return self._ddp.no_sync()

    def sum_gradients(self) -> None:
        """Finish the exchange of the gradients, and turn DDP's means over the processes into sums.

        Larger losses would give the same sums, but make logged gradients and the overflow of fp16
        depend on the number of processes.
        """
        if self._exchange is not None:
            self._exchange.finish()
        if self._ddp is None:
            return
        gradients: list[Tensor] = []
        unused: list[str] = []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                unused.append(plain(name))
            else:
                gradients.append(parameter.grad)
        if unused:  # DDP has not sent all gradients: it was still waiting for these.
            raise UserError(
                f"no gradient reaches {', '.join(unused[:4])}{', ...' * (len(unused) > 4)}: several "
                "processes cannot train such parameters; name them in finetune.freeze"
            )
        for (group,) in by_kind(gradients).values():
            torch._foreach_mul_(group, collectives.world_size())

    def average_statistics(self) -> None:
        """Average the processes' own running statistics, if BatchNorm is not synchronised."""
        if collectives.world_size() == 1 or self.is_synchronised:
            return
        running: list[Tensor] = []
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.training:
                running += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        collectives.average_(running)
