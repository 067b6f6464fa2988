"""Studies (`duet study`): experiments with many runs on questions about GANs and classifiers."""

COMMANDS = {
    "study": (
        "duetgan.extras.studies.command",
        "answer a question with many runs: do generated images help a classifier?",
    )
}
NEEDS = ("few_labels",)  # label spreading
