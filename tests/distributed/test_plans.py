"""Plans with wildcards, tuples, split keys and uneven tokens: fp64, against the plain network in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fsdp_cp import build_mesh, sequence_lengths
from fsdp_cp.attention import context_parallel_attention, cross_attention
from fsdp_cp.context.check_parallel import gradient_errors, relative_error
from fsdp_cp.context_parallel import EmbedOwnTokens, GatherTokens, SplitTokens, parallelize_context
from fsdp_cp.sequence import gather_tokens, split_tokens
from fsdp_cp.sharding.activations import recompute_in_backward
from tests.tiers import long_case, slow_case

DIM, HEADS, TEXT = 12, 3, 7
PLAN = {
    "": {"text": SplitTokens(1, expected_dims=3)},
    "blocks.0": {"hidden_states": SplitTokens(1)},
    "blocks.*": {"tables": SplitTokens(0)},
    "head": GatherTokens(1),
}


def _plain_attention(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.q = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv, self.mlp, self.mesh, self.tokens = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM), None, None

    def forward(self, hidden_states, text, tables=None, *, nothing=None):
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, HEADS, -1)).unbind(2)
        scale, shift = tables
        q, k = (x * scale[:, None] + shift[:, None] for x in (q, k))
        cross_q, (cross_k, cross_v) = self.q(hidden_states), self.kv(text).unflatten(-1, (2, HEADS, -1)).unbind(2)
        cross_q = cross_q.unflatten(-1, (HEADS, -1))
        if self.mesh is None:
            out, cross = _plain_attention(q, k, v), _plain_attention(cross_q, cross_k, cross_v)
        else:
            out = context_parallel_attention(q, k, v, mesh=self.mesh, total_tokens=self.tokens)
            cross = cross_attention(cross_q, cross_k, cross_v, mesh=self.mesh, total_keys=self.tokens and "text")
        return hidden_states + self.out((out + cross).flatten(2)) + self.mlp(hidden_states.tanh())


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.embed_text, self.head = nn.Linear(5, DIM), nn.Linear(6, DIM), nn.Linear(DIM, 5)
        self.tables = nn.Parameter(torch.randn(2, 32, DIM // HEADS))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.again = None

    def forward(self, x, text):
        tables = [table[: x.shape[1]] for table in self.tables]
        x, text = self.embed(x), self.embed_text(text)
        for i, block in enumerate(self.blocks):
            if self.again is None:
                x = block(x, text, tables=tuple(tables)) if i else block(x, text, tables)
            else:
                x = checkpoint(block, x, text, tables[0], tables[1], use_reentrant=self.again)
        return self.head(x)


class Apart(Block):
    """Block for reentrant checkpointing, which sees no tensors inside tuples."""

    def forward(self, hidden_states, text, scale, shift):
        return super().forward(hidden_states, text, (scale, shift))


def _network(seed=0, kind=Block):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network().double()
        if kind is Apart:
            for i, block in enumerate(network.blocks):
                network.blocks[i] = Apart().double()
                network.blocks[i].load_state_dict(block.state_dict())
        return network


def _data(tokens):
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((2, tokens, 5), (2, TEXT, 6), (2, tokens, 5))
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


def _step(networks, calls):
    """Return the outputs of ``calls`` (number of the network, tokens), and all gradients of one backward."""
    outputs, loss = [], 0.0
    for which, tokens in calls:
        x, text, target = _data(tokens)
        outputs.append(networks[which](x, text))
        loss = loss + (outputs[-1] - target).square().sum()
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for network in networks for p in network.parameters()]
    return [x.detach() for x in outputs], grads


def _parallel_step(cp, calls, mode, named=False):
    sequence_lengths._ended.clear()  # forwards of other tests, since other checkpointing searches all of them
    mesh = build_mesh(cp=cp, heads=HEADS, ring=cp)
    kind = Apart if mode in ("reentrant", "torch") else Block
    networks = [_network(seed, kind) for seed in range(2)]
    torch._dynamo.reset()  # Dynamo keeps 8 graphs per code object, over all tests
    for network in networks:
        plan = copy.deepcopy(PLAN)
        if kind is Apart:
            plan["blocks.*"] = {"scale": SplitTokens(0), "shift": SplitTokens(0)}
            network.again = mode == "reentrant"
        for block in network.blocks:
            block.mesh, block.tokens = mesh, "hidden_states" if named else None
        parallelize_context(network, mesh=mesh, plan=plan)
        for block in network.blocks:
            if mode == "ours":
                recompute_in_backward(block)
            if mode == "compile":
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    outputs, grads = _step(networks, calls)
    dp = dist.get_world_size() // cp
    for grad in grads:
        dist.all_reduce(grad)
        grad /= dp
    return outputs, grads


def _compare(pools, cp, calls, mode, named=False):
    truth_outputs, truth = _step([_network(seed) for seed in range(2)], calls)
    for outputs, grads in pools[max(cp, 2)].run(_parallel_step, cp, calls, mode, named):
        for ours, theirs in zip(outputs, truth_outputs, strict=True):
            assert relative_error(ours, theirs) <= 1e-12
        assert max(gradient_errors(dict(enumerate(grads)), dict(enumerate(truth))).values()) <= 1e-11


@pytest.mark.parametrize(
    ("cp", "mode"),
    [(3, "plain"), (3, "ours"), *(slow_case(*case) for case in ((2, "torch"), (3, "reentrant")))],
)
def test_wildcards_tuples_and_split_keys_of_uneven_counts(pools, cp, mode):
    """The counts are 11 tokens and 7 of text, without ``total_tokens``."""
    _compare(pools, cp, [(0, 11)], mode)


CALLS = [(0, 11), (1, 12), (0, 5), (1, 10), (0, 2)]  # 11, 12 and 10 make 4 on each of 3 ranks; of 2 one has none


@pytest.mark.parametrize(
    ("mode", "named"),
    [("ours", True), *(long_case(mode, False) for mode in ("plain", "compile"))],
)
def test_each_forward_has_its_own_count(pools, mode, named):
    """Two networks and five lengths precede one backward, which runs the blocks again."""
    calls = CALLS[:2] if mode == "compile" else CALLS  # a graph for each number
    _compare(pools, 3, calls + [(1, 8)] * named, mode, named)  # 8 make 3, as do the text's 7: a name is needed


def _ambiguous():
    for mode in ("torch", "reentrant"):
        with pytest.raises(ValueError, match="total_tokens"):
            _parallel_step(3, [(0, 11), (0, 12)], mode)
    return True


def test_a_recomputation_that_may_be_of_two_forwards_is_refused(pools):
    """Only this project's checkpointing finds the forward that a recomputation belongs to."""
    assert all(pools[3].run(_ambiguous))


def _masked_keys():
    mesh, one = build_mesh(cp=3, ring=3), build_mesh()
    generator = torch.Generator().manual_seed(5)
    full = [torch.randn(2, n, 2, 4, generator=generator, dtype=torch.float64) for n in (11, 7, 7, 11, 7, 7)]
    mask = torch.rand(2, 7, generator=generator) < 0.6
    results = []
    for on in (one, mesh):
        own = [split_tokens(x, on) for x in full]
        with torch.no_grad(), forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(own[:3], own[3:], strict=True)]
            out = forward_ad.unpack_dual(cross_attention(*duals, key_mask=mask, mesh=on, total_keys=7))
            results.append([gather_tokens(x.clone(), on, 11) for x in out])
    return max(map(relative_error, *results))


def test_split_keys_with_a_mask_and_a_derivative(pools):
    assert max(pools[3].run(_masked_keys)) < 1e-13


class Pair(nn.Module):
    """Attention over the sequence that its argument names."""

    def __init__(self, attend):
        super().__init__()
        self.stream, self.attend = nn.Identity(), attend

    def forward(self, x, text=None, tables=None):
        return self.attend(self.stream(x), text)


def _heads(x):
    return x.unflatten(-1, (1, -1))


def _refused_counts():
    mesh = build_mesh(cp=3, ring=3)
    x = torch.randn(2, 11, 4)

    def run(attend, given, splits=("x", "text"), **splits_of):
        model = Pair(attend)
        parallelize_context(model, mesh=mesh, plan={"": {name: SplitTokens(1) for name in splits} | splits_of})
        return model(x, given)

    def own(x, text):
        return context_parallel_attention(_heads(x), _heads(x), _heads(x), mesh=mesh)

    def joined(x, text, total_tokens=None):
        both = _heads(torch.cat((text, x), 1))
        return context_parallel_attention(both, both, both, mesh=mesh, total_tokens=total_tokens)

    def refused(name, attend, given, *splits, **splits_of):
        with pytest.raises(ValueError, match=name):
            run(attend, given, *splits, **splits_of)

    def cross(x, text, **options):
        return cross_attention(*map(_heads, (x, text, text)), **options)

    refused("text", own, torch.randn(2, 12, 4))
    refused("q", joined, torch.randn(2, 7, 4))
    assert run(lambda x, text: joined(x, text, ("text", "x")), torch.randn(2, 7, 4)).shape[1] == 7
    refused("total_tokens", lambda x, text: joined(x, text, ("text", "y")), torch.randn(2, 7, 4))
    refused("k", cross, torch.randn(2, 7, 4))
    refused("total_keys", lambda x, text: cross(x, text, mesh=mesh, total_keys=12), torch.randn(2, 7, 4))
    whole = torch.randn(2, 3, 4)  # the size of a share, but the whole text
    run(lambda x, text: cross(x, whole, total_keys=3), torch.randn(2, 7, 4))
    refused("text", own, 3)
    refused("text", own, (x, "text"))
    refused("text", own, (x, x), ("x",), text=[SplitTokens(1)])
    assert run(own, None).shape[1] == 4
    by_hand = _heads(split_tokens(x, mesh))
    with pytest.raises(ValueError, match="total_tokens"):
        context_parallel_attention(by_hand, by_hand, by_hand, mesh=mesh)
    return True


def test_counts_that_cannot_be_told_are_refused(pools):
    assert all(pools[3].run(_refused_counts))


def _refused_plans(cp):
    mesh = build_mesh(cp=cp, ring=cp)
    network, split, gather = _network(), SplitTokens(1), GatherTokens(1)
    for plan, name in (
        ({"block.*": {"tables": split}}, "block"),
        ({"blocks.*.attn": gather}, "attn"),
        ({"head.*": gather}, "head"),
        ({"blocks.*": {"rotary": split}}, "rotary"),
        ({"blocks.0": {"tables": SplitTokens(1, split_output=True)}}, "tables"),
        ({"blocks.0": {"tables": SplitTokens("1")}}, "split_dim"),
        ({"head": GatherTokens(None)}, "gather_dim"),
        ({"head": 3}, "head"),
        ({"head": EmbedOwnTokens()}, "head"),
        ({"blocks.0": {"text": split}, "blocks.*": {"text": split}}, "text"),
        ({"blocks.*": gather, "blocks.1": gather}, r"blocks\.1"),
    ):
        with pytest.raises(ValueError, match=name):
            parallelize_context(network, mesh=mesh, plan=plan)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules()), plan
    if cp > 1:
        parallelize_context(network, mesh=mesh, plan={"embed": gather, "blocks.*": {"hidden_states": split}})
        with pytest.raises(ValueError, match="embed"):
            network(*_data(11)[:2])
        network = _network()
        parallelize_context(network, mesh=mesh, plan=PLAN | {"blocks.1": {"hidden_states": split}})
        for block in network.blocks:
            block.mesh = mesh
        with pytest.raises(ValueError, match="hidden_states"):
            network(*_data(11)[:2])
        chain = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.LayerNorm(4), nn.Linear(4, 4))
        parallelize_context(chain, mesh=mesh, plan={"0": {"input": split}, "0.0": gather, "2": {"input": split}})
        with pytest.raises(ValueError, match="input"):
            chain(torch.randn(2, 11, 4))
    else:
        parallelize_context(network, mesh=mesh, plan=PLAN)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    return True


@pytest.mark.parametrize("cp", [1, 3])
def test_plans_that_are_wrong_are_refused_on_one_rank_too(pools, cp):
    assert all(pools[max(cp, 2)].run(_refused_plans, cp))


def _dropout():
    mesh = build_mesh(cp=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.1)), nn.Linear(4, 4))
    plan = {"0": {"input": SplitTokens(1)}, "2": GatherTokens(1)}
    with pytest.raises(ValueError, match="dropout"):
        parallelize_context(model, mesh=mesh, plan=plan)
    parallelize_context(model, mesh=build_mesh(), plan=plan)
    parallelize_context(model.eval(), mesh=mesh, plan=plan)
    x = torch.randn(1, 3, 4)
    assert model(x).shape == x.shape
    with pytest.raises(ValueError, match="dropout"):
        model.train()(x)
    model[1][0].p = 0.0
    return model(x).shape == x.shape


def test_dropout_is_refused_where_its_masks_would_depend_on_the_mesh(pools):
    assert all(pools[2].run(_dropout))
