"""The number of images seen is counted: a resume with another batch size does not make it run backwards (U6)."""

import json
from pathlib import Path

from tests.training.base.test_stopping import Judged, judged_loop


class Batched(Judged):
    """A task whose batch is not always 8."""

    def __init__(self, size):
        super().__init__([0.5] * 6)
        self.size = size

    def images_at(self, step):
        return self.size * step


def trained(packed, folder, size, *, until=None):
    loop = judged_loop(packed, folder, patience=None)
    loop.task = Batched(size)
    loop.config.batch_size, loop.config.log.every = size, 2
    loop.resume()
    loop.run(until)
    loop.folder.close()
    return loop


def counts(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["images"] for row in rows if "images" in row}


def test_images_are_counted_over_a_resume_with_another_batch_size(packed: Path, tmp_path: Path):
    trained(packed, tmp_path / "run", 8, until=6)
    loop = trained(packed, tmp_path / "run", 4)
    assert counts(tmp_path / "run") == {2: 16, 4: 32, 6: 48, 8: 56, 10: 64, 12: 72}
    assert loop.images == loop.state_dict()["images"] == 72
