"""The studies of `duet study`, by name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from duetgan.extras.studies.images import StudyConfig
    from duetgan.extras.studies.subject import Subject

# Name of a study -> its question. A new study needs a line here and a file studies/NAME.py with
# CONFIG, a subclass of StudyConfig, and SUBJECT, a subclass of Subject.
SUBJECTS = {
    "augment": "do a generator's samples help the classifier?",
    "distil": "can samples carry what a teacher knows?",
    "labels": "with few labels, what do images without labels add?",
}


def load_subject(name: str) -> tuple["type[StudyConfig]", "type[Subject]"]:
    """Return the configuration class and the subject class of a study."""
    module = import_module(f"duetgan.extras.studies.{name}")
    return module.CONFIG, module.SUBJECT
