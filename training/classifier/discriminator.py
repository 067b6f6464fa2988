"""A classifier's start from a GAN's discriminator (`model.name: discriminator`)."""

from metrics.lineage import passport_of
from models.backbones.discriminator import Trunk, form_of
from models.classifier import Classifier
from models.restore import discriminator_from, generator_from
from utils.checkpoint import load, resolve
from utils.errors import UserError
from utils.passport import join, recorded


def load_discriminator(model: Classifier) -> str:
    """Copy the weights of the discriminator of the GAN's run that `model.config.weights` names, and leave the head new;
    returns what was taken, for a person.

    The discriminator has seen its generator's samples: the classifier's lineage says so, and it cannot judge any.
    Raises UserError for another task's checkpoint, and for a discriminator of another form than the config's.
    """
    run = model.config.weights
    assert run is not None
    path = resolve(run)
    content = load(path)
    state = Trunk(discriminator_from(content)).state_dict()
    taken = {name: value for name, value in state.items() if not name.startswith("fc.")}
    if form_of(content) != model.config.discriminator:
        raise UserError(f"model.weights {run}: its discriminator is not model.discriminator; leave that out")
    model.network.load_state_dict(taken, strict=False)
    passport = passport_of(generator_from(content), content, seed=content["config"].get("seed", 0))
    model.lineage = join(recorded(content), {"trained_on": [], "synthetic": [passport]})
    return f"weights from {path}: its discriminator up to 4 px, {len(taken)} tensors; head new"
