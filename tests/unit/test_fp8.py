"""fp8 layers: which layers are converted, what is refused, and their products against torchao's."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fsdp_cp.launch import exit_code
from fsdp_cp.runtime import packages
from fsdp_cp.sharding import fp8
from fsdp_cp.sharding.settings import ShardSettings
from tests.oracles.transformer_engine import E4M3, E5M2, rounded, stand_in
from tests.unit.refused import refusal, refused

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
    with refused("fake.fp8"):
        fp8.linear_layers(blocks, where="fake.")


@pytest.mark.parametrize(
    ("package", "version"),
    [("torchao", None), ("torchao", "0.17.1"), ("transformer_engine", None), ("transformer_engine", "2.16.1")],
)
def test_without_its_library(monkeypatch, package, version):
    def installed(name):
        if version is None:
            raise packages.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(packages.metadata, "version", installed)
    packages.optional_package.cache_clear()
    fp8.require_fp8(ShardSettings(), "cpu")
    said = refusal(fp8.require_fp8, ShardSettings(fp8=package), "cuda", "student.")
    packages.optional_package.cache_clear()
    install = {
        "torchao": "pip install 'fsdp-cp[fp8]'",
        "transformer_engine": "pip install --no-build-isolation 'fsdp-cp[te]'",
    }
    assert "student.fp8" in said and install[package] in said


@pytest.mark.parametrize("version", ["2.19.0", "2.20.2"])
def test_transformer_engine_on_a_cpu_and_compiled(monkeypatch, capsys, version):
    """Before 2.20 ``compile`` is refused by version; later by a trial, which fails here without a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(packages.metadata, "version", lambda _: version)
    monkeypatch.setattr(packages.importlib, "import_module", stand_in().__getitem__)
    packages.optional_package.cache_clear()
    fp8.compile_refusal.cache_clear()
    settings = ShardSettings(fp8="transformer_engine")
    fp8.require_fp8(settings, "cuda")
    with refused("fake.fp8"):
        fp8.require_fp8(settings, "cpu", "fake.")
    compiled = replace(settings, compile=True)
    for where in ("fake.", "student."):
        assert exit_code(lambda where=where: fp8.require_fp8(compiled, "cuda", where)) == 2
        said = capsys.readouterr().err
        assert f"{where}compile" in said and said.count("\n") == 1 and ("2.20" in said) == (version < "2.20")
    assert fp8.compile_refusal.cache_info().misses == 1, "one trial serves all roles"
    packages.optional_package.cache_clear()
    fp8.compile_refusal.cache_clear()


def test_on_a_gpu_without_fp8_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    fp8.require_fp8(SETTINGS, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    with refused("teacher.fp8"):
        fp8.require_fp8(SETTINGS, "cuda", "teacher.")


def converted(block: nn.Module) -> list[nn.Module]:
    """Replace the layers of ``block``. Return the fp8 layers."""
    block.up, block.down = (fp8.torchao_linear(layer, emulate=True) for layer in (block.up, block.down))
    return [block.up, block.down]


def test_parameters_stay_the_same_objects_under_the_same_names():
    block = Block()
    before = dict(block.named_parameters())
    assert all(type(layer).__name__ == "Float8Linear" for layer in converted(block))
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


@pytest.fixture
def transformer_engine(monkeypatch):
    """Install the stand-in, written from the package's signatures and assertions."""
    modules = stand_in()
    find = lambda module="transformer_engine.pytorch", at_least="": modules[module]  # noqa: E731
    monkeypatch.setattr(fp8, "transformer_engine", find)
    fp8._layer_class.cache_clear()
    yield modules
    fp8._layer_class.cache_clear()


def test_wiring_of_transformer_engine(transformer_engine):
    """Parameters stay under their names, no state, any number of rows, gradients of the recipe, plain duals."""
    torch.manual_seed(0)
    plain, block = Block(), Block()
    block.load_state_dict(plain.state_dict())
    before = dict(block.named_parameters())
    block.up, block.down = map(fp8.te_linear, (block.up, block.down))
    assert isinstance(block.up, transformer_engine["transformer_engine.pytorch"].Linear)
    after = dict(block.named_parameters())
    assert list(after) == list(before) and all(after[name] is parameter for name, parameter in before.items())
    assert list(block.state_dict()) == list(before)
    block.load_state_dict(plain.state_dict())
    for rows in ((2, 5), (1,), (3, 16), (8,)):
        x, down = torch.randn(*rows, 32, requires_grad=True), torch.randn(*rows, 32)
        grads = torch.autograd.grad(block(x), [x, *block.parameters()], down)
        for grad, expected in zip(grads, _by_hand(plain, x.detach(), down), strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)
    block.requires_grad_(False)
    x, dx = torch.randn(3, 32), torch.randn(3, 32)
    with torch.no_grad(), forward_ad.dual_level():
        found, expected = (forward_ad.unpack_dual(net(forward_ad.make_dual(x, dx))) for net in (block, plain))
    assert torch.equal(found.primal, expected.primal) and torch.equal(found.tangent, expected.tangent)
    assert not torch.equal(block(x), plain(x)), "without tangents it computes in fp8"


def _by_hand(block, x, down):
    """Return the gradients of the input and the parameters of ``block``, with the recipe's rounding."""
    rows, grad = x.reshape(-1, 32), down.reshape(-1, 32)
    up, second = block.up.weight.detach(), block.down.weight.detach()
    hidden = torch.tanh(rounded(rows, E4M3) @ rounded(up, E4M3).T + block.up.bias.detach())
    grad_second = rounded(grad, E5M2).T @ rounded(hidden, E4M3)
    inner = rounded(grad, E5M2) @ rounded(second, E4M3) * (1 - hidden**2)
    grad_up = rounded(inner, E5M2).T @ rounded(rows, E4M3)
    return (grad + rounded(inner, E5M2) @ rounded(up, E4M3)).view(x.shape), grad_up, inner.sum(0), grad_second
