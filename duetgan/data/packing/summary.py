"""Hold the result of packing, and summarise it as text."""

from dataclasses import dataclass
from pathlib import Path

from duetgan.data.images import MEANS
from duetgan.data.lmdb.format import Meta
from duetgan.data.packing.sources import Problem
from duetgan.utils.text import columns, listed

LISTED = 10  # most ignored files in the summary
# name in the metadata -> text for the user (data.images.fit)
RESIZING = {
    "none": "not resized",
    "zero-pad": "larger images scaled down, smaller ones padded with zeros",
    "centre-crop+lanczos": "centre crop, scaled by Lanczos",
}


@dataclass(kw_only=True)
class Summary:
    """The result of packing a source."""

    meta: Meta  # of the training file
    held_out: Meta | None  # of the file of held-out images
    held_out_path: Path | None
    problems: list[Problem]  # of skipped images
    ignored: list[str]  # files that are no images by their name
    seconds: float  # until the file was complete
    duplicates: str  # text about exact duplicates

    def lines(self, dest: Path) -> list[str]:
        """Return the summary as aligned lines. `dest` is the path of the training file."""
        meta, held_out = self.meta, self.held_out
        image = meta.spec
        count = meta.count
        rows = [("packed", f"{dest} ({dest.stat().st_size:,} bytes)")]
        if held_out is not None:
            count += held_out.count
            text = f"{held_out.count:,} of {count:,} images, {held_out.count / count:.1%}"
            rows.append(("held out", f"{self.held_out_path}: {text}"))
            if held_out.split is not None and held_out.split.groups is not None:
                text = f"{held_out.split.groups:,} held out whole ({held_out.split.group_by})"
                rows.append(("groups", text))
        side = f"{image.width}x{image.height}" if image.side else "sizes of their own"
        rows += [
            ("source", meta.source),
            ("images", f"{meta.count:,}, {side}, {image.words}"),
            ("time", f"{self.seconds:.1f} s, {count / self.seconds:,.0f} images/s"),
            ("encoding", f"{meta.encoding}, {resizing_text(meta.resize_filter)}"),
            ("resolutions", " ".join(map(str, meta.resolutions))),
            ("classes", str(len(meta.classes) or "none, unlabelled")),
        ]
        for label, name in enumerate(meta.classes):
            part = f", {held_out.by_class[label]:,} held out" if held_out else ""
            rows.append((f"  {name}", f"{meta.by_class[label]:,}{part}"))
        rows.append(("duplicates", self.duplicates))
        if self.problems:
            rows.append(("skipped", f"{len(self.problems):,}"))
            rows += [("", str(problem)) for problem in self.problems]
        if self.ignored:
            rows.append(("ignored", f"{len(self.ignored):,}: {listed(self.ignored, LISTED)}"))
        return columns(rows, "<").splitlines()


def resizing_text(resize_filter: str) -> str:
    """Return a text that tells how images were resized, for the metadata's `resize_filter`."""
    full = resize_filter.removesuffix(MEANS)
    text = RESIZING.get(full, full)
    return text if full == resize_filter else f"{text}; lower resolutions by means of 2x2 pixels"
