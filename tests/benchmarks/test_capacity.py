"""The law of width and length finds what was planted, and reads runs as `train.py` and `evaluate.py` leave them."""

import json

import numpy as np
import pytest

from benchmarks.gan.capacity import fit, law, read


def test_a_planted_law_is_found_and_expects_what_it_did_not_see():
    channels, kimg = (each.ravel() for each in np.meshgrid([8.0, 16.0, 32.0], [30.0, 60.0, 120.0]))
    planted = np.array([np.log(0.8), np.log(2000.0), 0.5, 0.9])
    over = law(planted, channels, kimg)
    assert over[0] == pytest.approx(1.8 + 2000 * 8**-0.5 * 30**-0.9)
    found = fit(channels, kimg, over)
    assert found == pytest.approx(planted, rel=1e-3)
    assert law(found, np.array(24.0), np.array(640.0)) == pytest.approx(1.8 + 2000 * 24**-0.5 * 640**-0.9, rel=1e-3)


def test_a_run_is_read_as_it_was_trained_and_evaluated(tmp_path):
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "metrics.json").write_text(
        json.dumps({"n": 5000, "distances": [{"extractor": "resnet50", "frechet": 300.0, "floor": 60.0}]})
    )
    network = "generator: {channel_base: 768, channel_max: 192}"
    (tmp_path / "config.yaml").write_text(f"task: gan\nsteps: 7500\nbatch_size: 16\n{network}\n")
    rows = [{"images_per_second": speed} for speed in (90.0, 100.0, 130.0)] + [{"val/frechet/pixels": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read(tmp_path) == (24, 120.0, 5.0, 100.0)
