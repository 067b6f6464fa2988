"""Configuration of the classifier, and its checks against the data and the number of processes."""

from typing import ClassVar, Literal, Self

from duetgan.data.augment.transforms import MixingAugment
from duetgan.data.reading.dataset import Dataset
from duetgan.models.classifier import ModelConfig
from duetgan.models.weights import missing_published, trained_symmetric
from duetgan.training.base.compiled import CompileSetting
from duetgan.training.base.config import RunConfig
from duetgan.training.base.data import check_same_classes
from duetgan.training.classifier.finetune import FineTuneConfig
from duetgan.training.classifier.loss import ClassifierLossConfig
from duetgan.training.classifier.resizing import ResizingConfig
from duetgan.training.optim.updater import OptimizerConfig
from duetgan.utils.config.model import Config, Decay
from duetgan.utils.config.yaml_files import Tree
from duetgan.utils.distributed import collectives
from duetgan.utils.errors import UserError, refuse
from duetgan.utils.runlog.run_log import say_main


class ClassifierEmaConfig(Config):
    """The moving average of the classifier: the network that is evaluated and used.

    With a schedule-free optimizer this network has the optimizer's own average of the weights, and
    only the statistics of BatchNorm are averaged here.
    """

    decay: Decay = 0.999  # decay per step, at most (1 + step) / (10 + step)


class ClassifierConfig(RunConfig):
    """All settings of a classifier's training."""

    can_halve: ClassVar[bool] = True

    task: Literal["classifier"] = "classifier"
    compile: CompileSetting = "auto"  # torch.compile; auto: on accelerators only
    # auto: BatchNorm's statistics are of the samples of all processes; off: of each process
    sync_bn: Literal["auto", "off"] = "auto"
    model: ModelConfig = ModelConfig()
    finetune: FineTuneConfig = FineTuneConfig()
    loss: ClassifierLossConfig = ClassifierLossConfig()
    optimizer: OptimizerConfig = OptimizerConfig(
        name="sgd", lr=0.1, weight_decay=5e-4, warmup_steps=200, schedule="cosine"
    )
    ema: ClassifierEmaConfig = ClassifierEmaConfig()
    augment: MixingAugment = MixingAugment()
    resizing: ResizingConfig = ResizingConfig()

    def check(self) -> None:
        super().check()
        model = self.model
        # "auto" depends on the pretrained weights. The run stores the resolved value, so that a
        # resume with other weights is noticed.
        if model.normalise == "auto":
            imagenet = model.imagenet_normalised and not trained_symmetric(str(model.weights))
            self.model = model.changed(normalise="imagenet" if imagenet else "symmetric")
        has_linear_head = model.head == "readout" or (
            model.head == "linear" and model.backbone.head_bias
        )
        refuse(
            (
                model.split != "off" and self.compile == "on",
                "compile on cannot be combined with model.split: a compiled network is on one device; set compile auto "
                "or off, or leave model.split out",
            ),
            (
                self.finetune.probe and not has_linear_head,
                "finetune.probe fits a linear head with a bias: set model.head linear, or leave it out",
            ),
            (
                model.head == "readout" and self.resizing != ResizingConfig(),
                "model.head readout has as many inputs as its maps have parts: leave resizing out",
            ),
        )

    def with_weights_at_hand(self, started: Tree) -> Self:
        """Return this config, but without its pretrained weights if they cannot be downloaded.

        All layers then train from scratch.

        Args:
            started: Config with which the run started, whose choice is kept; empty for a new run.
        """
        if self.model.weights not in (published := self.model.backbone.published(self.model.name)):
            return self
        if started:
            from_scratch = (started.get("model") or {}).get("weights", "") is None
        else:
            reason = missing_published(
                published[self.model.weights], f"{self.model.name}'s weights {self.model.weights}"
            )
            from_scratch = bool(reason)
            if reason:
                say_main(
                    f"warning: training from scratch, because {reason}, or give --model.weights FILE"
                )
        if not from_scratch:
            return self
        return self.changed(model=self.model.changed(weights=None), finetune=FineTuneConfig())

    def for_trial(self, samples: int) -> Self:
        return (
            super().for_trial(samples).changed(model=self.model.changed(weights=None, split="off"))
        )

    @property
    def several_devices(self) -> bool:
        return self.model.split != "off"


def check_run(config: ClassifierConfig, dataset: Dataset, val_dataset: Dataset | None) -> None:
    """Raise UserError if the config cannot be run with these images and this number of processes.

    `training.base.data` must have checked the labels before.
    """
    check_classes(config, dataset, val_dataset)
    check_batches(config, collectives.world_size())
    if config.early_stopping.patience is not None and val_dataset is None:
        raise UserError("early_stopping.patience needs validation images; give data.val_path")


def check_classes(config: ClassifierConfig, dataset: Dataset, val_dataset: Dataset | None) -> None:
    """Raise UserError unless the classes of the data sets agree with each other and with the head.

    Also raise it if the training images have fewer than two classes or a class without images.
    """
    classes, path = dataset.classes, config.data.path
    have_several = dataset.meta.sets is not None
    refuse(
        (
            len(classes) < 2,
            f"{path}: a classifier needs two classes or more, this file has {len(classes)}; pack a folder of class "
            "folders",
        ),
        (
            config.loss.several and not have_several,
            f"{path}: its images have one label each: set loss.kind cross-entropy, or pack lists of labels",
        ),
        (
            have_several and not config.loss.several,
            f"{path}: its images may have several labels: set --loss.kind bce, or asymmetric where most are absent",
        ),
        (
            config.loss.several and config.finetune.probe,
            "finetune.probe is a regression for one label an image; set --finetune.probe false",
        ),
        (
            config.model.classes is not None and config.model.classes != len(classes),
            f"{path}: has {len(classes)} classes, labels 0 to {len(classes) - 1}, but the head has model.classes "
            f"{config.model.classes}; make it {len(classes)} or leave it out",
        ),
    )
    for name, count in zip(classes, dataset.meta.by_class, strict=True):
        if count == 0:
            raise UserError(
                f"{path}: class {name!r} has no image; remove it or add images, and pack again"
            )
    if val_dataset is not None:
        check_same_classes(config.data, dataset, val_dataset)


def check_batches(config: ClassifierConfig, world_size: int) -> None:
    """Raise UserError if a process's batch cannot be mixed or split as the config says."""
    rank_batch = config.rank_batch(world_size)
    refuse(
        (
            config.augment.mixes and rank_batch % 2,
            f"augment.mixup and augment.cutmix mix pairs of samples, but each process holds {rank_batch}; make "
            f"batch_size a multiple of {2 * world_size}",
        ),
        (
            config.micro_batch == "auto" and world_size > 1,
            "micro_batch auto is for one process: the one without memory would leave the others waiting; give a "
            "number",
        ),
    )
