"""Entries of the studies' recipes in the reference of config keys."""

from duetgan.extras.studies.subjects import SUBJECTS, load_subject
from duetgan.training.reference import TASKLESS

for name in SUBJECTS:
    TASKLESS[name] = load_subject(name)[0]
