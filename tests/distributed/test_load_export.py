"""Weights from and to diffusers folders, at more ranks than some parameters have rows."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fsdp_cp import build_mesh
from fsdp_cp.errors import UserError
from models.roles.role_plan import plan_role
from tests.oracles.full_tensors import full_tensors
from tests.oracles.samples import video
from tests.oracles.tiny_wan import LATENT_SHAPE, TEXT_SHAPE, text_condition, tiny_role
from tests.tiers import slow_case


def _load(path):
    mesh = build_mesh(dp_shard=3, cp=1, heads=4)
    plan = plan_role("student", checkpoint=str(path))
    return tiny_role(plan, mesh)


def _weights_and_output(path):
    role = _load(path)
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, *LATENT_SHAPE, generator=generator), torch.randn(1, *TEXT_SHAPE, generator=generator)
    with torch.no_grad():
        out = role.velocity(video(x), torch.tensor([0.7]), text_condition(text)).video
    return full_tensors(role.weights()), (x, text, out)


@pytest.mark.parametrize(
    "kind",
    ["one_file", *(slow_case(kind) for kind in ("several_files", "bf16", "pipeline"))],
)
def test_every_rank_reads_its_shards(pools, checkpoints, tmp_path, kind):
    network = WanTransformer3DModel.from_pretrained(checkpoints / "student")
    path = tmp_path / "model"
    if kind == "bf16":
        torch.nn.Module.to(network, torch.bfloat16)
    source = path / "transformer" if kind == "pipeline" else path
    network.save_pretrained(source, max_shard_size="20KB" if kind == "several_files" else "1GB")
    if kind == "several_files":
        assert len(list(path.glob("*.safetensors"))) > 2
    weights, (x, text, out) = pools[3].run(_weights_and_output, path)[2]
    network = WanTransformer3DModel.from_pretrained(source, torch_dtype=torch.float32)
    for name, parameter in network.named_parameters():
        assert weights[name].dtype == torch.float32
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=0)
    with torch.no_grad():
        # The rotary tables are not in the files: a wrong restoration shows here.
        truth = network(hidden_states=x, timestep=torch.tensor([700.0]), encoder_hidden_states=text).sample
    torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-5)


def _elements_read(path):
    count = 0
    process = HuggingFaceStorageReader._process_read_request

    def counting(self, file, request, planner):
        nonlocal count
        count += torch.Size(request.lengths).numel()
        return process(self, file, request, planner)

    HuggingFaceStorageReader._process_read_request = counting
    _load(path)
    HuggingFaceStorageReader._process_read_request = process
    return count


def test_a_rank_reads_no_more_than_its_shards(pools, checkpoints):
    """The numbers of rows that the ranks read add up to the file, so no rank reads the whole file."""
    ranks = pools[3].run(_elements_read, checkpoints / "teacher")
    with safe_open(checkpoints / "teacher" / "diffusion_pytorch_model.safetensors", framework="pt") as file:
        total = sum(file.get_tensor(name).numel() for name in file.keys())
    assert sum(ranks) == total
    assert max(ranks) < 0.6 * total


def _outcome(path, cut=0):
    mesh = build_mesh(dp_shard=3, cp=1, heads=4)
    plan = plan_role("student", checkpoint=str(path))
    torch.distributed.barrier()
    if cut and torch.distributed.get_rank() == 1:  # after the plan has looked at it, as a copy that goes wrong would
        file = next(path.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-cut])
    torch.distributed.barrier()
    try:
        tiny_role(plan, mesh)
    except UserError as error:
        return str(error)


def test_damaged_weights_are_refused_on_every_rank(pools, checkpoints, tmp_path):
    """All ranks refuse non-finite numbers in one rank's shard, and a file that was cut since the plan.

    A rank that did not see the damage would continue to a collective that never ends.
    """
    network = WanTransformer3DModel.from_pretrained(checkpoints / "student")
    for cut in (4, 10**6):
        network.save_pretrained(tmp_path / f"cut_{cut}")
    with torch.no_grad():
        network.blocks[0].ffn.net[2].weight[-1, -1] = torch.nan
        network.proj_out.bias[0] = torch.inf
    network.save_pretrained(tmp_path / "not_finite")
    for path, cut, named in (
        ("cut_4", 4, "student.checkpoint"),
        ("cut_1000000", 10**6, "student.checkpoint"),
        ("not_finite", 0, "blocks.0.ffn.net.2.weight"),
    ):
        for said in pools[3].run(_outcome, tmp_path / path, cut):
            assert said is not None and named in said and str(tmp_path / path) in said and "\n" not in said
