from pathlib import Path

import pytest
import torch

from data.dataset import Dataset
from training.classifier import ClassifierConfig, ClassifierTask
from training.config import DataConfig
from training.plan import plan_rows


@pytest.mark.parametrize(("batch_size", "warned"), [(200, False), (201, True)])
def test_a_batch_larger_than_the_data_set_is_mentioned(packed: Path, batch_size: int, warned: bool) -> None:
    file = packed / "train.lmdb"
    config = ClassifierConfig(data=DataConfig(path=str(file)), batch_size=batch_size, steps=3)
    config.model.stem = "small-stride2"
    with Dataset(file) as reader:
        task = ClassifierTask(config, reader, None, torch.device("cpu"))
        rows = plan_rows(config, task, reader, None, "", torch.device("cpu"))
    assert ("warning" in rows) == warned
    if warned:
        assert "batch larger than the data set: each batch holds repeats" in rows["warning"]
        assert "at most 200" in rows["warning"]
    assert rows["length"] == f"3 steps = {3 * batch_size} pictures = {3 * batch_size / 200:.1f} epochs"
