"""The graph of all networks in TensorBoard."""

from contextlib import closing

import torch

from duetgan.extras.graph.graph import draw
from duetgan.utils.runlog.run_log import Events
from tests.end_to_end.helpers import graph_scopes


def test_one_graph_shows_all_networks_and_leaves_their_modes(tmp_path):
    first, second = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout()), torch.nn.Bilinear(2, 3, 1)
    first[1].eval()
    second.eval()
    x = torch.zeros(1, 2)
    with closing(Events(tmp_path / "tensorboard", purge_step=None)) as events:
        draw(events, {"first": (first, (x,)), "second": (second, (x, torch.zeros(1, 3)))})
    assert [path for path in (tmp_path / "tensorboard").iterdir() if path.is_dir()] == []
    assert {"first", "second", "1"} <= graph_scopes(tmp_path)
    assert [module.training for module in (first, first[0], first[1], second)] == [True, True, False, False]
