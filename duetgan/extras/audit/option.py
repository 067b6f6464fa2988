"""Add `--audit` to evaluate.py."""

from duetgan.commands.evaluate import KINDS, SPEED, Kind

KINDS["audit"] = Kind(
    "gan",
    "duetgan.extras.audit.evaluate:audit_gan_run",
    "duetgan.extras.audit.membership_inference:audit_table",
    SPEED | dict.fromkeys(("classifier", "per_class")),
    "not for --audit",
    file="audit.json",
    help="GAN: only measure how much samples reveal about training images (docs/extras/audit.md)",
)
KINDS["classifier"].unsupported["audit"] = False
