import pytest
import torch

from duetgan.models.layers import convolution
from duetgan.models.r3gan import Block, Stage
from duetgan.utils.seeding import forked
from tests.models.helpers import draw, randomised


def nodes(tensor):
    """Names of all nodes of a tensor's graph."""
    seen, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def test_a_penalty_takes_no_slow_second_derivative_and_its_inner_gradient_none_for_weights(monkeypatch):
    asked = []

    def count(*arguments):
        asked.append("input" if arguments[-1] else "weight")
        return original(*arguments)

    original = convolution._Gradient.forward
    monkeypatch.setattr(convolution._Gradient, "forward", staticmethod(count))
    with forked(0, "init", "penalty"):
        stage = Stage(4, 6, [Block(6, 12, 3, gain=1.0)], "down")
    stage = randomised(stage)
    x = draw(2, 4, 8, 8).requires_grad_()
    with convolution.penalised():
        y = stage(x)
    (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    assert asked == ["input"] * 4  # three convolutions of the block, the change of width
    penalty = gradient.square().sum()
    assert not any(name.startswith("ConvolutionBackward") for name in nodes(penalty))
    penalty.backward()
    assert asked.count("weight") == 8  # once as the weight of a convolution, once as the weight of its gradient


@pytest.mark.parametrize(("resample", "change", "blocks"), [("up", 4, 8), ("down", 2, 2)])
def test_stages_change_the_width_where_the_maps_are_small(resample, change, blocks):
    """The change and resampling can be exchanged: no number shows it."""
    stage = Stage(6, 4, [Block(4, 8, 2, gain=1.0)], resample)
    assert stage.change is not None
    heights = []
    for module in (stage.change, stage.blocks):
        module.register_forward_pre_hook(lambda _, inputs: heights.append(inputs[0].shape[2]))
    stage(draw(2, 6, 4, 6).float())
    assert heights == [change, blocks]
