"""Studies: many runs, paired over seeds and test images, one table and one verdict. `study.py`
starts them.
"""

from importlib import import_module
from typing import Any

# name -> its question; another study is one more file studies/NAME.py, which has CONFIG, a
# StudyConfig, and SUBJECT: (config, folder, device), and one more line here
SUBJECTS = {
    "augment": "do a generator's samples help the classifier?",
    "cas": "how good a training set are samples, and what makes them better?",
    "distil": "can samples carry what a teacher knows?",
    "labels": "with few labels, what do images without labels add?",
    "teach": "what does a classifier's loss do to a generator?",
}


def load_subject(name: str) -> tuple[Any, Any]:
    """A study's configuration class and its subject."""
    module = import_module(f"duetgan.studies.{name}")
    return module.CONFIG, module.SUBJECT
