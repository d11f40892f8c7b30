"""fp8 layers: which layers are converted, what is refused, and their products against torchao's."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fsdp_cp.errors import UserError
from fsdp_cp.sharding import fp8
from fsdp_cp.sharding.settings import ShardSettings

SETTINGS = ShardSettings(fp8="torchao")


class Block(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 64):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def test_layers_of_the_blocks_between_the_first_and_the_last():
    blocks = [Block() for _ in range(4)]
    blocks[2].down = nn.Linear(40, 64)
    assert fp8.linear_layers(blocks, [blocks[1].up]) == [blocks[1].down, blocks[2].up]
    units = [nn.Linear(16, 16), Block(), nn.Linear(16, 16), nn.Linear(16, 16)]
    assert fp8.linear_layers(units) == [units[1].up, units[1].down], "a unit that is a layer itself stays"


@pytest.mark.parametrize("blocks", [[Block(), Block()], [Block(), Block(33, 40), Block()]])
def test_nothing_to_convert_is_refused(blocks):
    with pytest.raises(UserError, match="fake.fp8"):
        fp8.linear_layers(blocks, where="fake.")


@pytest.mark.parametrize("version", [None, "0.17.1"])
def test_without_its_library(monkeypatch, version):
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None if version is None else name)
    monkeypatch.setattr(fp8.metadata, "version", lambda name: version)
    fp8.require_fp8(ShardSettings(), "cpu")
    with pytest.raises(UserError, match="student.fp8"):
        fp8.require_fp8(SETTINGS, "cpu", "student.")


def test_on_a_gpu_without_fp8_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    fp8.require_fp8(SETTINGS, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(UserError, match="teacher.fp8"):
        fp8.require_fp8(SETTINGS, "cuda", "teacher.")


def converted(block: nn.Module) -> list[nn.Module]:
    """Convert a block between two plain ones. Return its fp8 layers."""
    return fp8.convert(block, {id(block.up), id(block.down)}, emulate=True)


def test_parameters_stay_the_same_objects_under_the_same_names():
    block = Block()
    before = dict(block.named_parameters())
    layers = converted(block)
    assert layers == [block.up, block.down]
    after = dict(block.named_parameters())
    assert list(after) == list(before) and all(after[name] is parameter for name, parameter in before.items())


def test_products_and_gradients_are_torchaos():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    ours, theirs = Block(), Block()
    theirs.load_state_dict(ours.state_dict())
    converted(ours)
    convert_to_float8_training(theirs, config=Float8LinearConfig(emulate=True))
    x, down = torch.randn(2, 5, 32), torch.randn(2, 5, 32)

    def gradients(block):
        block.zero_grad()
        inputs = x.clone().requires_grad_()
        out = block(inputs)
        out.backward(down)
        return out.detach(), inputs.grad, [p.grad for p in block.parameters()]

    out, of_input, of_weights = gradients(theirs)
    found = gradients(ours)
    assert torch.equal(found[0], out) and torch.equal(found[1], of_input)
    assert all(torch.equal(mine, other) for mine, other in zip(found[2], of_weights, strict=True))


def test_forward_mode_runs_the_plain_layers():
    torch.manual_seed(0)
    plain, block = Block(), Block()
    block.load_state_dict(plain.state_dict())
    converted(block)
    x, dx = torch.randn(3, 32), torch.randn(3, 32)
    with torch.no_grad(), forward_ad.dual_level():
        found, expected = (forward_ad.unpack_dual(net(forward_ad.make_dual(x, dx))) for net in (block, plain))
    assert torch.equal(found.primal, expected.primal) and torch.equal(found.tangent, expected.tangent)
    assert not torch.equal(block(x), plain(x)), "without tangents it computes in fp8"
