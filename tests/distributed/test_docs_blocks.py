"""Every Python block of the library's pages runs as it stands, with the names that the text around it speaks of."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_cp import build_mesh, microbatch, shard_module
from fsdp_cp.local_ranks import run_ranks
from tests.distributed.test_diffusers_attention import _network_and_inputs

ROOT = Path(__file__).parents[2]
PAGES = ("sharding", "attention", "gradients", "plans")
TOKENS, DIM, HEADS = 10, 24, 12


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, time=None):
        for block in self.blocks:
            x = block(x)
        return x if time is None else x * time[:, None, None]


def _sharding():
    torch.manual_seed(0)
    model = Network()
    names = {
        "torch": torch,
        "model": model,
        "micro_batches": list(torch.randn(2, 1, TOKENS, DIM)),
        "share_of_the_batch": 0.5,
        "loss": lambda y: y.float().square().mean(),
        "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
    }
    (block,) = _blocks("sharding")
    exec(block, names)
    return all(p.grad is not None and p.grad.full_tensor().norm() > 0 for p in model.parameters())


def _attention():
    first, second = _blocks("attention")
    torch.manual_seed(0)
    x, text = torch.randn(1, TOKENS, DIM), torch.randn(1, 3, HEADS, 2)

    def project(x_local):
        return (x_local.unflatten(-1, (HEADS, 2)) * (1 + i) for i in range(3))

    names = {"x": x, "S": TOKENS, "project": project, "k_text": text, "v_text": text}
    names["y_local"] = None
    before, gather = first.rstrip().rsplit("\n", 1)  # the rank's output, y_local, comes from what stands before it
    exec(before, names)
    q, k, v = names["q"], names["k"], names["v"]
    attended = names["context_parallel_attention"](q, k, v, mesh=names["mesh"], total_tokens=TOKENS)
    names["y_local"] = attended.flatten(2)
    exec(gather, names)
    full = [t.transpose(1, 2) for t in project(x)]
    expected = F.scaled_dot_product_attention(*full).transpose(1, 2).flatten(2)
    assert (names["y"] - expected).norm() / expected.norm() < 1e-5
    assert names["out"].shape == q.shape

    network = Network()
    shard_module(network, mesh=names["mesh"], units=network.blocks)
    time = torch.tensor([0.3])
    names = {"torch": torch, "network": network, "x": x, "t_x": x.sin(), "time": time, "t_time": torch.ones(1)}
    exec(second, names)
    plain = Network()
    plain.load_state_dict({name: p.full_tensor() for name, p in network.state_dict().items()})
    value, derivative = torch.func.jvp(plain, (x, time), (x.sin(), torch.ones(1)))
    assert torch.allclose(names["velocity"], value) and torch.allclose(names["derivative"], derivative, atol=1e-6)
    return True


def _gradients():
    double, difference = _blocks("gradients")
    mesh = build_mesh()
    torch.manual_seed(0)
    model = Network()
    shard_module(model, mesh=mesh, units=model.blocks, strategy="optim_grads")
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    exec(double, {"torch": torch, "microbatch": microbatch, "model": model, "x": x})
    reduced = all(p.grad is not None and p.grad.full_tensor().norm() > 0 for p in model.parameters())
    names = {"torch": torch, "model": model, "x": x, "sigma": 0.1}
    exec(difference, names)
    return reduced and names["penalty"].item() > 0


class Rotated(Block):
    def forward(self, hidden_states, rotary):
        cos, sin = rotary
        return super().forward(hidden_states * cos + sin)


class Planned(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Rotated() for _ in range(2)), nn.Linear(DIM, DIM)

    def forward(self, x):
        rotary = torch.linspace(0, 1, x.shape[1])[:, None].cos(), torch.linspace(0, 1, x.shape[1])[:, None].sin()
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(x)


def _plans():
    by_hand, check, of_diffusers = _blocks("plans")
    torch.manual_seed(0)
    mesh, model, x = build_mesh(cp=3), Planned(), torch.randn(2, 11, DIM)
    expected = model(x)
    names = {"model": model, "mesh": mesh}
    exec(by_hand, names)
    assert torch.allclose(model(x), expected, atol=1e-6)
    exec(check, {"__name__": "imported"})
    network, inputs = _network_and_inputs("ltx", 11, 7)
    expected = network(**inputs, return_dict=False)[0]
    exec(of_diffusers, names | {"network": network})
    return torch.allclose(network(**inputs, return_dict=False)[0], expected, atol=1e-10)


@pytest.mark.parametrize(("function", "ranks"), [(_sharding, 4), (_attention, 8), (_gradients, 3), (_plans, 3)])
def test_the_blocks_of_a_page(function, ranks):
    assert run_ranks(ranks, function) == [True] * ranks


def test_no_page_of_the_library_is_left_out():
    """The blocks of ``run.md``, ``experts.md`` and ``hunyuan.md`` are diffusers', on a checkpoint of the reader's."""
    with_blocks = {page.stem for page in (ROOT / "docs").rglob("*.md") if "```python" in page.read_text()}
    assert with_blocks - {"run", "experts", "hunyuan"} == set(PAGES)
    assert "fsdp_cp" not in "".join(_blocks("run") + _blocks("methods/experts") + _blocks("hunyuan"))
