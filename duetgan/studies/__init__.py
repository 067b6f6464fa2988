"""Studies: many runs, paired by seed and test image, with a table and verdicts; see `study.py`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duetgan.studies.images import StudyConfig
    from duetgan.studies.subject import Subject

# name -> question. A new study is a file studies/NAME.py, with CONFIG, a StudyConfig, and SUBJECT,
# a class of (config, folder, device), and a line here.
SUBJECTS = {
    "augment": "do a generator's samples help the classifier?",
    "cas": "how good a training set are samples, and what makes them better?",
    "distil": "can samples carry what a teacher knows?",
    "labels": "with few labels, what do images without labels add?",
    "teach": "what does a classifier's loss do to a generator?",
}


def load_subject(name: str) -> tuple["type[StudyConfig]", "type[Subject]"]:
    """Return a study's configuration class and its subject class."""
    module = import_module(f"duetgan.studies.{name}")
    return module.CONFIG, module.SUBJECT
