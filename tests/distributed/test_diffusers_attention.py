"""diffusers' networks by their own plans, uneven tokens, text and masks: fp64, against the plain network."""

import inspect

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import CogVideoXTransformer3DModel, LTXVideoTransformer3DModel, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn

from fsdp_cp import build_mesh, sequence_lengths
from fsdp_cp.context.check_parallel import check_parallel, gradient_errors, relative_error
from fsdp_cp.context.diffusers_attention import KNOWN, parallelize_attention
from fsdp_cp.context_parallel import GatherTokens, SplitTokens, parallelize_context
from tests.tiers import slow_case

SEQUENCES = {"qwen": ("encoder_hidden_states", "hidden_states")}


def _ltx(tokens, text):
    network = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=8, cross_attention_dim=24,
        num_layers=2, caption_channels=10,
    )  # fmt: skip
    mask = torch.ones(2, text, dtype=torch.float64)
    mask[1, text - 3 : text - 1] = 0
    return network, {
        "hidden_states": _random(2, tokens, 4), "encoder_hidden_states": _random(2, text, 10),
        "timestep": torch.tensor([500, 700]), "encoder_attention_mask": mask,
        "num_frames": tokens, "height": 1, "width": 1,
    }  # fmt: skip


def _qwen(tokens, text):
    network = QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=3,
        joint_attention_dim=10, axes_dims_rope=(2, 2, 4), zero_cond_t=True,
    )  # fmt: skip
    mask = torch.ones(2, text, dtype=torch.bool)
    mask[1, -2:] = False
    return network, {
        "hidden_states": _random(2, tokens, 4), "encoder_hidden_states": _random(2, text, 10),
        "encoder_hidden_states_mask": mask, "timestep": torch.tensor([0.5, 0.7], dtype=torch.float64),
        "img_shapes": [[(1, 2, 2), (1, 1, tokens - 4)]] * 2,
    }  # fmt: skip


def _random(*size):
    return torch.randn(*size, dtype=torch.float64)


NETWORKS = {"ltx": _ltx, "qwen": _qwen}


def _network_and_inputs(name, tokens, text, checkpointing=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, inputs = NETWORKS[name](tokens, text)
        for parameter in network.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    if checkpointing:
        network.enable_gradient_checkpointing()
    return nn.Module.double(network).train(), inputs


def _step(network, inputs):
    out = network(**inputs, return_dict=False)[0]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in network.named_parameters()}


def _parallel(name, tokens, text, cp, checkpointing, sequences):
    sequence_lengths._ended.clear()  # forwards of other tests: diffusers' checkpointing looks at all
    mesh = build_mesh(cp=cp, heads=3)
    network, inputs = _network_and_inputs(name, tokens, text, checkpointing)
    parallelize_attention(network, mesh=mesh, sequences=sequences)
    parallelize_context(network, mesh=mesh, plan=network._cp_plan)
    out, grads = _step(network, inputs)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= mesh.dp_size
    return out, grads


@pytest.mark.parametrize(
    ("name", "cp", "tokens", "text", "checkpointing"),
    [
        ("ltx", 3, 11, 12, False),
        ("qwen", 2, 11, 7, False),
        slow_case("ltx", 2, 11, 7, True),
        slow_case("qwen", 3, 11, 7, True),
    ],
)
def test_outputs_and_gradients(pools, name, cp, tokens, text, checkpointing):
    """diffusers' own plan works unchanged. With 12 text tokens, a rank's share equals the video's: 4 tokens of each."""
    sequences = SEQUENCES.get(name, ("hidden_states",) if text == 12 else None)
    out, grads = _step(*_network_and_inputs(name, tokens, text))
    for ours, found in pools[max(cp, 2)].run(_parallel, name, tokens, text, cp, checkpointing, sequences):
        assert max(relative_error(ours, out), *gradient_errors(found, grads).values()) <= 1e-10


class Processor:
    def __call__(self, attn, hidden_states, *_, **__):
        return hidden_states


class Elsewhere(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.heads, self.processor = 3, processor

    def forward(self, hidden_states):
        return self.processor(self, hidden_states)


def _refusals():
    mesh = build_mesh(cp=2)
    network, inputs = _network_and_inputs("ltx", 11, 7)
    with pytest.raises(ValueError, match="refiner"):
        parallelize_attention(network, mesh=mesh, whole=["refiner"])
    with pytest.raises(ValueError, match="Linear"):
        parallelize_attention(nn.Linear(1, 1), mesh=mesh)
    parallelize_attention(network, mesh=mesh)
    with pytest.raises(ValueError, match="transformer_blocks.0.attn1"):  # before the plan has split any tokens
        network(**inputs)
    network.transformer_blocks[0].attn1.processor = Processor()
    parallelize_context(network, mesh=mesh, plan=network._cp_plan)
    with pytest.raises(ValueError, match="Processor"):
        network(**inputs)
    network, inputs = _network_and_inputs("qwen", 11, 7)
    parallelize_attention(network, mesh=mesh)
    parallelize_context(network, mesh=mesh, plan=network._cp_plan)
    with pytest.raises(ValueError, match="sequences"):
        network(**inputs)
    network, inputs = _network_and_inputs("qwen", 8, 6)
    parallelize_attention(network, mesh=mesh)
    plan = {"transformer_blocks.0": {"hidden_states": SplitTokens(1)}, "proj_out": GatherTokens(1),
            "transformer_blocks.*": {"modulate_index": SplitTokens(1)}}  # fmt: skip
    parallelize_context(network, mesh=mesh, plan=plan)
    network.pos_embed.register_forward_hook(lambda _m, _a, out: (out[0].chunk(2)[mesh.cp_rank], out[1]))
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        network(**inputs)
    network = CogVideoXTransformer3DModel(  # its processors call torch's attention themselves
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=1, text_embed_dim=8,
        time_embed_dim=8, sample_width=4, sample_height=4, sample_frames=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="CogVideoX"):
        parallelize_attention(network, mesh=mesh)
    return True


def test_what_would_attend_to_own_tokens_alone_is_refused(pools):
    assert all(pools[2].run(_refusals))


class Dispatching:
    """Processor of this file, which imports diffusers' function as its model files do."""

    def __init__(self, **settings):
        self.settings = settings

    def __call__(self, attn, hidden_states):
        x = hidden_states.unflatten(-1, (attn.heads, -1))
        return dispatch_attention_fn(x, x, x, **self.settings).flatten(2)


class Refined(nn.Module):
    """Attention over all tokens on every rank, then over split ones."""

    def __init__(self, **settings):
        super().__init__()
        self.refiner, self.block = Elsewhere(Dispatching()), Elsewhere(Dispatching(**settings))
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.head(self.block(self.refiner(self.embed(x))))


def _settings():
    mesh, x = build_mesh(cp=2, ring=2), _random(2, 7, 6)
    plan = {"block": {"hidden_states": SplitTokens(1)}, "head": GatherTokens(1)}

    def run(**settings):
        model = Refined(**settings).double()
        parallelize_attention(model, mesh=mesh, whole=["refin*"])
        parallelize_context(model, mesh=mesh, plan=plan)
        return model(x)

    biased, per_query, per_head = _random(1, 1, 1, 4), torch.ones(2, 1, 4, 4).bool(), torch.ones(1, 3, 1, 4).bool()
    per_head[0, 1, 0, 0] = False
    for settings in (
        {"dropout_p": 0.1},
        {"is_causal": True},
        {"attn_mask": biased},
        {"attn_mask": per_query},
        {"attn_mask": per_head},
    ):
        with pytest.raises(ValueError, match="block"):
            run(**settings)
    return run(scale=0.3).shape == x.shape


def test_what_split_tokens_cannot_do_is_refused(pools):
    assert all(pools[2].run(_settings))


def _refined():
    model = Refined(scale=0.3)
    model.load_state_dict({n: torch.linspace(-1, 1, p.numel()).view_as(p) for n, p in model.state_dict().items()})
    return model


def _leave_refiner(model, mesh):
    parallelize_attention(model, mesh=mesh, whole=["refiner"])


def test_attention_over_tokens_that_all_ranks_hold_is_left_alone():
    plan = {"block": {"hidden_states": SplitTokens(1)}, "head": GatherTokens(1)}
    assert check_parallel(_refined(), plan, (_random(2, 7, 6),), prepare=_leave_refiner, cp=(3,))[3] < 1e-12


def test_the_function_is_the_one_of_diffusers_0_42():
    names = tuple(inspect.signature(dispatch_attention_fn).parameters)
    assert names == KNOWN, f"diffusers {diffusers.__version__} changed dispatch_attention_fn: {names}"


def test_a_network_elsewhere_is_left_alone():
    """All networks of a class share the namespace; only the given networks are on the mesh."""
    ours, inputs = _network_and_inputs("ltx", 11, 7)
    other, _ = _network_and_inputs("ltx", 11, 7)
    before, _ = _step(other, inputs)

    class OneRank:
        cp_size, cp_rank = 1, 0

    mesh = type("OneProcess", (), {"context": OneRank(), "cp_size": 1})()
    parallelize_attention(ours, mesh=mesh)
    after, _ = _step(other, inputs)
    assert torch.equal(before, after)
