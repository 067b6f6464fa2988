"""Where images and weights come from: the passport of samples, and the lineage that a checkpoint records."""

from collections.abc import Sequence

from torch import nn

from data.lmdb.format import Meta
from data.reading.dataset import Dataset
from metrics.extractors import fingerprint
from utils.checkpoint import Checkpoint
from utils.errors import UserError
from utils.passport import Lineage, Passport, check_passport, join


def passport_of(
    generator: nn.Module,
    checkpoint: Checkpoint,  # that it comes from
    *,
    seed: int,  # of the draws
    truncation_psi: float = 1.0,
    selection: str | None = None,  # the rule by which samples are chosen; None: all that are drawn
) -> Passport:
    """The passport of samples of a generator. Raises UserError for a seed or psi that no file can hold."""
    passport = {
        "generator": fingerprint(generator),
        "step": checkpoint["step"],
        "seed": seed,
        "truncation_psi": float(truncation_psi),
        "selection": selection,
        "trained_on": (checkpoint.get("data") or {}).get("content_hash") or None,
        "classes": list(checkpoint["classes"]),
    }
    try:
        check_passport("", passport)
    except ValueError as error:
        raise UserError(f"the samples' passport cannot be written: {error}; give another value") from None
    return passport


def lineage_of(*readers: Dataset, passports: Sequence[Passport] = ()) -> Lineage:
    """What training on these files, and on samples with these passports, leaves in a checkpoint."""
    metas = [meta for reader in readers for meta in metas_of(reader)]
    return join(
        {
            "trained_on": [known for meta in metas for known in (meta.content_hash, meta.fingerprint) if known],
            "synthetic": [meta.passport for meta in metas if meta.passport],
        },
        {"trained_on": [], "synthetic": list(passports)},
    )


def metas_of(reader: Dataset) -> list[Meta]:
    """The metadata of a data set, and of each of its files where there are several."""
    return [reader.meta, *(shard.meta for shard in reader.shards if len(reader.shards) > 1)]
