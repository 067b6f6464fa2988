"""Answer a question about GANs and classifiers with many runs, controls and confidence intervals.

`duet study augment`: do generated images help a classifier? The results are in study.json. After an
interruption the same command continues.
"""

import json
from pathlib import Path
from typing import Any

from duetgan.extras.studies.subjects import SUBJECTS, load_subject
from duetgan.utils.config.build import build
from duetgan.utils.config.cli import Parser, entry
from duetgan.utils.config.recipes import CONFIGS, recipe_file
from duetgan.utils.config.yaml_files import read_yaml
from duetgan.utils.runlog.run_folder import runs_folder


def parser() -> Parser:
    options = Parser(
        prog="duet study",
        description=__doc__,
        epilog="Override any key of the recipe with --section.key value.",
    )
    add = options.add_argument
    add(
        "subject",
        metavar="SUBJECT",
        help="; ".join(f"{name}: {question}" for name, question in SUBJECTS.items()),
    )
    add("--config", metavar="FILE", help="YAML recipe (default: configs/study_SUBJECT.yaml)")
    add("--out", metavar="DIR", help="folder of the study (default: runs/NAME of the recipe)")
    add(
        "--quick",
        action="store_true",
        help="apply the section quick of the recipe: a first answer, with wide intervals",
    )
    add(
        "--device", metavar="cpu|cuda[:i]", help="device (default: the accelerator if there is one)"
    )
    add("--json", action="store_true", help="print study.json instead of the verdict")
    return options


def main(argv: list[str]) -> int:
    """Run the missing parts of a study and print the result."""
    options, overrides = parser().parse_known(argv)
    entry(SUBJECTS, options.subject, "study")
    file = CONFIGS / f"study_{options.subject}.yaml"
    if options.config:
        file = Path(recipe_file(options.config))
    out = options.out or str(runs_folder() / (file.stem + "_quick" * options.quick))
    tree = read_yaml(file)

    # These import torch.
    from duetgan.extras.studies.images import quickened
    from duetgan.extras.studies.runner import Study

    config_class, subject_class = load_subject(options.subject)
    tree = quickened(tree) if options.quick else tree
    config: Any = build(config_class, tree, overrides, source=str(file))
    folder = Path(out).resolve()
    study = Study(options.subject, subject_class(config, folder, options.device))
    document = study.run()
    if options.json:
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    for arm in document["arms"]:
        recalls = [f"{group} {100 * mean:.1f} %" for group, mean in arm["recall"].items()]
        print(f"{arm['name']}: mean recall, {', '.join(recalls)}")
    print("\n".join(document["words"]))
    print(f"written: {folder / 'study.json'}")
    return 0
