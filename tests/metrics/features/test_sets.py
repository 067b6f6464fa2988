import pytest

from duetgan.metrics.features.sets import chunk_size, shared_pass
from duetgan.utils.errors import UserError


@pytest.mark.parametrize(("side", "size"), [(8, 64), (32, 64), (128, 64), (256, 16), (300, 11), (512, 4), (1024, 4)])
def test_a_chunk_is_as_many_images_as_memory_allows(side, size):
    assert chunk_size(side) == size


@pytest.mark.parametrize("batch_size", [1, 64, 100, 1000])
def test_chunks_begin_at_the_same_images_whatever_the_batch_size(batch_size):
    chunks = list(shared_pass(150, lambda rows: rows, side=32, batch_size=batch_size))
    assert chunks == [range(64), range(64, 128), range(128, 150)]
    assert list(shared_pass(0, lambda rows: rows, side=32, batch_size=batch_size)) == []


@pytest.mark.parametrize(("multiple", "size"), [(1, 64), (6, 60), (64, 64), (100, 100)])
def test_chunks_of_whole_groups(multiple, size):
    chunks = list(shared_pass(300, lambda rows: rows, side=32, batch_size=64, multiple=multiple))
    assert {len(rows) for rows in chunks[:-1]} == {size}
    assert [i for rows in chunks for i in rows] == list(range(300))


def test_work_is_done_as_the_results_are_taken_and_its_errors_are_raised():
    """A pass over many images does not hold what it has not been asked for."""

    def work(rows):
        done.append(rows)
        if len(done) == 2:
            raise UserError("broken")

    done: list[range] = []
    results = shared_pass(1000, work, side=32, batch_size=64)
    next(results)
    assert done == [range(64)]
    with pytest.raises(UserError, match="broken"):
        next(results)
