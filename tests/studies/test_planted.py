"""Studies whose truth is known, on the embedded sample: regressions learn what generators give that copy, draw noise,
give nothing, or pass held-back real images off as samples.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.weighted_sampling import few_labels
from duetgan.studies.baselines import pixels
from duetgan.studies.images import HELD_BACK, TEST, TRAIN, StudyConfig, StudyData
from duetgan.studies.results import Comparison
from duetgan.studies.runner import Study
from duetgan.studies.subject import Job, Subject, scored
from duetgan.training.classifier.probe import fit

REAL, FEW, EXTRA, CHANCE = "real images", 10, 20, "more images, labels by chance"
TRUTHS = {
    "copies": "cannot tell",
    "noise": ("hurts", "cannot tell"),
    "the base itself": "cannot tell",
    "held-back images": "helps",
}


def images_of(file):
    with Dataset(file) as reader:
        return pixels(reader) / 255, torch.tensor(reader.labels())


class Planted(Subject):
    """Each seed draws FEW images of each class; an arm adds what its generator gives, about EXTRA a class if real."""

    title = "Do samples help?"

    def declare(self):
        for name in (REAL, *TRUTHS, CHANCE):
            against = [Comparison(REAL, controls=(CHANCE,), asked=True)] * (name in TRUTHS)
            self.add(Job(name, name, "planted", against), partial(self.learn, name), images=self.part(TRAIN))

    def learn(self, name, _place, seed, images):
        (x, y), (more, named) = images_of(images), images_of(self.part(HELD_BACK))
        few = slice(None, None, len(more) // (EXTRA * 10))
        more, named = more[few], named[few]
        rows = torch.from_numpy(few_labels(y.numpy(), FEW, seed))
        x, y = x[rows], y[rows]
        draws = torch.Generator().manual_seed(seed)
        given = {
            "copies": (x + 0.01 * torch.randn(x.shape, generator=draws), y),
            "noise": (torch.rand(x.shape, generator=draws), torch.randint(10, y.shape, generator=draws)),
            "held-back images": (more, named),
            CHANCE: (more, torch.randint(10, named.shape, generator=draws)),
        }.get(name, (x[:0], y[:0]))
        groups = np.concatenate([np.arange(len(x)), np.arange(len(given[0])) + len(x) * (name != "copies")])
        found = fit(torch.cat([x, given[0]])[:, None], torch.cat([y, given[1]]), 10, seed=seed, groups=groups)
        asked, labels = images_of(self.part(TEST))
        return scored({TEST: (F.linear(asked, found.weight, found.bias).argmax(1) == labels).numpy()})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_verdicts_are_the_truth(tmp_path):
    data = StudyData(source="sample", size=8, largest=100, held_back=0.02)
    found = Study("planted", Planted(StudyConfig.model_construct(seeds=5, data=data), tmp_path)).run()
    verdicts = {row["second"]: row["verdict"] for row in found["comparisons"]}
    assert verdicts.keys() == TRUTHS.keys()
    for name, truth in TRUTHS.items():
        assert verdicts[name] in (truth if isinstance(truth, tuple) else (truth,)), (name, found["comparisons"])
