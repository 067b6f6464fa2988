"""How many threads decode, what is kept in memory, and how much of both there is."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from duetgan.data.packing.records import pack_arrays
from duetgan.data.reading import workers as workers_module
from duetgan.data.reading.dataset import Dataset
from duetgan.data.reading.sampler import SampleKeys
from duetgan.data.reading.workers import choose_workers, thread_counts
from duetgan.utils import machine
from tests.data.conftest import CLASSES, sample_images

KEYS = SampleKeys(1, np.arange(12), np.zeros(12, np.int64))


@pytest.fixture
def encoded(tmp_path: Path) -> Path:
    """12 PNGs of 16 px."""
    pack_arrays(tmp_path / "x.lmdb", sample_images(12, side=16), np.arange(12) % 3, CLASSES, encoding="png")
    return tmp_path / "x.lmdb"


def test_candidates_and_raw_images_need_no_threads(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {limit: thread_counts(limit) for limit in (1, 2, 3, 4, 6, 16)}
    assert found == {1: [0], 2: [0, 2], 3: [0, 2, 3], 4: [0, 2, 4], 6: [0, 2, 4, 6], 16: [0, 2, 4, 8, 16]}
    monkeypatch.setattr(Dataset, "read", lambda *_, **__: pytest.fail("measured"))
    assert choose_workers(Dataset(packed), 64) == (0, {})


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ({0: 4.0, 2: 2.0, 4: 1.0, 8: 0.5}, 8, 4),
        ({0: 4.0, 2: 2.0, 4: 1.9, 8: 0.1}, 2, 3),  # 4 threads do not pay: 8 are not tried
        ({0: 1.0, 2: 100.0, 4: 0.1, 8: 0.1}, 0, 2),  # a hundred times slower than none
        ({0: 1.0, 2: 0.95, 4: 0.1, 8: 0.1}, 0, 2),
        ({0: 1.0, 2: 0.9, 4: 2.0, 8: 2.0}, 2, 3),
    ],
)
def test_the_fastest_number_is_chosen(encoded, monkeypatch, seconds, best, tried):
    dataset = Dataset(encoded, workers=7)
    monkeypatch.setattr(workers_module, "cores", lambda: 8)

    def measured(reader: Dataset, records: np.ndarray) -> float:
        assert sorted(set(records.tolist())) == list(range(12))
        return seconds[reader.workers]

    monkeypatch.setattr(workers_module, "_seconds", measured)
    assert choose_workers(dataset, 64) == (best, {n: 12 / seconds[n] for n in sorted(seconds)[:tried]})
    assert dataset.workers == 7


def test_a_measurement_reads_no_more_than_a_batch(encoded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "cores", lambda: 2)
    with patch.object(Dataset, "read", autospec=True, side_effect=Dataset.read) as read:
        best, rates = choose_workers(Dataset(encoded), 5)
    assert best in (0, 2)
    assert set(rates) == {0, 2}
    assert all(rate > 0 for rate in rates.values())
    assert {len(call.args[1]) for call in read.call_args_list} == {5}
    dataset = Dataset(encoded, workers=3)
    monkeypatch.setattr(workers_module, "_seconds", lambda *_: 1 / 0)  # it leaves the data set as it was
    with pytest.raises(ZeroDivisionError):
        choose_workers(dataset, 4)
    assert dataset.workers == 3


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set files of /proc and /sys by name; nothing of this machine's own is left."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def write(**files: str) -> None:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".", 1)).write_text(text)

    return write


def test_available_memory_and_cores(system: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.available_bytes() > 1 << 20  # all of the machine's where the system does not say
    system(meminfo="MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:   5000 kB\n")
    assert machine.available_bytes() == 5000 * 1024
    system(memory_max="max\n")
    assert machine.available_bytes() == 5000 * 1024
    stat = "anon 300000\ninactive_file 150000\nactive_file 50000\n"
    system(memory_max="2000000\n", memory_current="500000\n", memory_stat=stat)
    assert machine.available_bytes() == 2000000 - 300000  # the file cache is given back when memory runs short
    system(memory_max="100000\n")
    assert machine.available_bytes() == 0
    system(memory_max="99999999999\n")
    assert machine.available_bytes() == 5000 * 1024
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.local_processes() == 3
    system(cpu_max="250000 100000\n")
    assert machine.cores() == 1
    system(cpu_max="max 100000\n")
    assert machine.cores() == 2
