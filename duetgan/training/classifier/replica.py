"""Wrap a classifier's network for training by one or several processes.

`Replica` compiles the network, adds up its gradients over the processes, and keeps BatchNorm's
statistics equal in all of them.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from duetgan.models.batchnorm import synchronise_batchnorm
from duetgan.models.classifier import Classifier
from duetgan.models.layers.scaling import scaled
from duetgan.training.base.compiled import Compiled, CompileSetting
from duetgan.training.classifier.config import ClassifierConfig
from duetgan.training.classifier.finetune import plain
from duetgan.training.classifier.network import widen_narrow_maps
from duetgan.utils.distributed import collectives
from duetgan.utils.distributed.collectives import by_kind
from duetgan.utils.distributed.gradients import GradientExchange
from duetgan.utils.errors import UserError


class ClassifierFromStage(nn.Module):
    """A classifier whose input is images, or the outputs of its first `begin` stages."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor, begin: int) -> Tensor:
        if begin == 0:
            return self.classifier(x)
        return self.classifier.head(self.classifier.features(x, begin=begin))


class Replica:
    """A wrapper of `model` that computes logits and gradients in this process.

    With several processes, DDP adds up the gradients. If steps are captured as CUDA graphs,
    `GradientExchange` adds them up instead, because DDP sends gradients in C++, where a graph
    cannot be split.

    BatchNorm normalises by the samples of all processes. With `sync_bn` off, each process
    normalises by its own samples, and the running statistics are averaged after each step.
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
        # The BatchNorms whose batches `count_batches` counts, with their counters.
        self.counters: dict[_BatchNorm, Tensor] = {}
        for norm in model.modules():
            # torch's SyncBatchNorm and cumulative averages need the counter.
            if not isinstance(norm, _BatchNorm) or isinstance(norm, nn.SyncBatchNorm):
                continue
            if norm.num_batches_tracked is not None and norm.momentum is not None:
                self.counters[norm] = norm.num_batches_tracked
        counted = set(self.counters.values())
        # running statistics of BatchNorm
        self.statistics = [buffer for buffer in model.buffers() if buffer not in counted]
        # Layers of each stage whose trained weights autocast would cast one by one.
        self._cast: list[list[tuple[nn.Module, str]]] = []
        self._ddp: DistributedDataParallel | None = None
        self._exchange: GradientExchange | None = None  # in place of DDP
        self._is_captured = captured
        self._forward: Compiled[..., Tensor] | None = None  # the model or DDP, compiled
        self._trained: list[bool] = []  # `requires_grad` of the parameters in the last `wrap`

    def wrap(self) -> bool:
        """Wrap and compile the model again if the set of trained parameters has changed.

        With several processes the wrapper is DDP, unless steps are captured. Return True if the set
        has changed since the last call, and at the first call.
        """
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        if trained == self._trained:
            return False
        is_first = not self._trained
        self._trained = trained
        self._ddp = self._forward = None  # This frees the previous buckets.
        self._cast = self._castable()
        self.model.zero_grad()
        module = ClassifierFromStage(self.model)
        if self._is_captured:
            parameters = self.model.parameters()
            self._exchange = GradientExchange(
                parameters, missing="zeros", compress=self.config.distributed.compress
            )
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
        """Return logits [n, classes] for images, or for the outputs of the first `begin` stages."""
        assert self._forward is not None
        with self._together():
            return self._forward(x, begin)

    def _castable(self) -> list[list[tuple[nn.Module, str]]]:
        """Return the parameters that `_together` casts, in one list for each stage.

        A parameter is given as a pair (layer, name of the parameter in the layer). The parameters
        of a stage are cast together, because DDP can send the gradients of such a group when the
        stage's backward pass ends.
        """
        layers: dict[object, list[tuple[nn.Module, str]]] = {}
        for prefix, module in self.model.named_modules():
            # Subclasses may compute with their weights, which autocast leaves in float32.
            if type(module) not in (nn.Conv2d, nn.Linear):
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and parameter.dtype == torch.float32:
                    key = self.model.stage_of(f"{prefix}.{name}"), parameter.device
                    layers.setdefault(key, []).append((module, name))
        return list(layers.values())

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Replace many small operators inside the block by a few that serve several layers each.

        The weights of a stage are cast together to the dtype of autocast, except for a compiled
        network, whose graph has fused casts. BatchNorms do not count their batches;
        `count_batches` does that.
        """
        assert self._forward is not None
        device = self.device.type
        attributes: list[tuple[nn.Module, str, Tensor | None]] = []
        for norm in self.counters:
            attributes.append((norm, "num_batches_tracked", None))
        if torch.is_autocast_enabled(device) and not self._forward.on:
            for layers in self._cast:
                weights = [module.get_parameter(name) for module, name in layers]
                copies = scaled(weights, None, torch.get_autocast_dtype(device))
                for (module, name), copy in zip(layers, copies, strict=True):
                    attributes.append((module, name, copy))
        for module, name, value in attributes:
            vars(module)[name] = value  # Python finds it before the parameter or buffer.
        try:
            yield
        finally:
            for module, name, _ in attributes:
                del vars(module)[name]

    def count_batches(self, applied: Tensor, passes: int) -> None:
        """Add the number of forward passes of a step to the counters of BatchNorms that train.

        `applied` is bool, 0-d. If it is False, because the update was masked, nothing is added.
        """
        counters = [counter for norm, counter in self.counters.items() if norm.training]
        for (device, dtype), (group,) in by_kind(counters).items():
            # With another dtype CUDA would run a kernel for each counter.
            torch._foreach_add_(group, applied.to(device, dtype), alpha=passes)

    def accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context manager for the passes of a micro-batch, which accumulate gradients.

        If `last` is True, the backward pass also begins the exchange of gradients between the
        processes.
        """
        if self._exchange is not None and last:
            self._exchange.overlap()
        if self._ddp is None or last:
            return nullcontext()
        return self._ddp.no_sync()

    def sum_gradients(self) -> None:
        """Finish the exchange of the gradients, and turn DDP's means over the processes into sums.

        Multiplying the losses by the number of processes would give the same sums. But logged
        gradients and the overflow of fp16 would then depend on this number. Raises UserError if DDP
        is used and a parameter that trains has no gradient.
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
        """Average BatchNorm's running statistics over the processes, if it is not synchronised."""
        if collectives.world_size() == 1 or self.is_synchronised:
            return
        running: list[Tensor] = []
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.training:
                running += [buffer for buffer in module.buffers() if buffer.is_floating_point()]
        collectives.average_(running)
