"""The classifier that judges edits, `--judge`."""

import torch

from duetgan.metrics.features.extractors import fingerprint
from duetgan.metrics.lineage import load_judge, run_folder
from duetgan.models.classifier import Classifier
from duetgan.models.restore import classifier_from, read
from duetgan.utils.checkpoint import Checkpoint, resolve
from duetgan.utils.errors import UserError


def load_edit_judge(
    run: str,  # run folder or checkpoint file of the judge
    checkpoint: Checkpoint,  # of the generator
    names: list[str],  # class names of the generator
    device: torch.device,
    *,
    guide: str,  # run or file of the classifier that the edits were found with
) -> Classifier:
    """Load the classifier that judges edits.

    Raises:
        UserError: If the classifier cannot judge the generator's samples, or is the guide or
            another checkpoint of the guide's run.
    """
    file, guide_file = resolve(run), resolve(guide)
    is_of_guide_run = (
        file.parent.name == "checkpoints"
        and run_folder(file).resolve() == run_folder(guide_file).resolve()
    )
    weights = fingerprint(classifier_from(read(guide_file)))
    if is_of_guide_run or fingerprint(classifier_from(read(file))) == weights:
        raise UserError(
            f"--judge {run} is the classifier that the edits were found with; give one of another training"
        )
    return load_judge(run, checkpoint, names, device, None, option="--judge")
