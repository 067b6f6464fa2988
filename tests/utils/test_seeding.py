import contextlib

import torch

from duetgan.utils.seeding import forked, generator, numpy_generator


def test_known_draws():
    assert numpy_generator(0, "order", 0).permutation(8).tolist() == [5, 0, 2, 1, 3, 4, 6, 7]
    assert torch.randint(1000, (4,), generator=generator(0, "order", 0)).tolist() == [283, 771, 514, 579]


def test_forked_seeds_inside_and_puts_back_outside():
    """Also after an error."""
    draws = []
    for seed, key in ((7, "init"), (8, "init"), (8, "other")):
        before = torch.manual_seed(seed).get_state()
        with contextlib.suppress(RuntimeError), forked(0, key):
            draws.append(torch.randn(2))
            raise RuntimeError
        assert torch.random.get_rng_state().equal(before)
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
