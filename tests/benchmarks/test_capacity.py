"""The law of width and length finds what was planted."""

import numpy as np
import pytest

from benchmarks.gan.capacity import fit, law


def test_a_planted_law_is_found_and_expects_what_it_did_not_see():
    channels, kimg = (each.ravel() for each in np.meshgrid([8.0, 16.0, 32.0], [30.0, 60.0, 120.0]))
    planted = np.array([np.log(0.8), np.log(2000.0), 0.5, 0.9])
    over = law(planted, channels, kimg)
    assert over[0] == pytest.approx(1.8 + 2000 * 8**-0.5 * 30**-0.9)
    found = fit(channels, kimg, over)
    assert found == pytest.approx(planted, rel=1e-3)
    assert law(found, np.array(24.0), np.array(640.0)) == pytest.approx(1.8 + 2000 * 24**-0.5 * 640**-0.9, rel=1e-3)
