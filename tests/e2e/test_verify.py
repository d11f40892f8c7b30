"""``python -m models.verify`` as a command; its checks can fail."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import verify
from models.families.wan import Wan
from models.families.wan_attention import WanCrossAttention
from tests.e2e.launch import ROOT
from tests.tiers import long, slow
from tests.tiny_pipeline import build_tiny_pipeline


@slow
def test_both_experts_of_a_pipeline(tmp_path, capsys):
    """The command prints a table for each expert. It refuses a non-finite number in the second expert."""
    build_tiny_pipeline(tmp_path, boundary=0.875)
    assert verify.main([str(tmp_path), "--ranks", "1"]) == 0
    assert capsys.readouterr().out.count("| 1 x 1 |") == 8
    file = next((tmp_path / "transformer_2").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["proj_out.bias"][0] = math.nan
    save_file(tensors, file)
    assert verify.main([str(tmp_path), "--ranks", "1"]) == 2
    assert "transformer_2: proj_out.bias" in capsys.readouterr().err


@slow
def test_a_causal_network(tmp_path, capsys):
    """A given first frame, both histories, and chunk by chunk."""
    verify.write_example(tmp_path / "network", "wan", Wan().examples()["ti2v"])
    assert verify.main([str(tmp_path / "network"), "--ranks", "1"]) == 0
    table = capsys.readouterr().out.partition("causal")[2]
    assert table.count("| noisy | - |") == table.count("| clean | ") == 4


@long
@pytest.mark.parametrize("family", ["ltx", "hunyuan15"])
def test_a_family_by_its_name(capsys, family):
    """The command checks all examples of the family on up to two ranks: two caption lengths, text and first frame."""
    assert verify.main([family, "--ranks", "2"]) == 0
    assert capsys.readouterr().out.count("| 1 x 2 | 45 | on |") == 4


def test_a_network_that_does_not_fit_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(verify, "available_host_memory", lambda: 10**7)
    assert verify.main([str(ROOT / "assets" / "quickstart_teacher")]) == 2
    assert "--ranks" in capsys.readouterr().err


@slow
def test_a_wrong_network_is_seen(tmp_path):
    """Every measure can fail: against other weights, and with a missing or non-finite gradient."""
    wan = Wan()
    verify.write_example(tmp_path / "network", "wan", wan.examples()["i2v"])
    plan = verify.planned(tmp_path / "network", "wan", checkpointing=False)
    truth = verify.plain_result(plan, (2, 2, 4))
    errors, _ = verify.compare(truth, truth, 0)
    assert max(errors.values()) == 0
    scales = {"output": 1.001, "derivative": 1.002, "norm": 1.1}
    other = {name: value * scales[name] for name, value in truth.values.items()}
    errors, _ = verify.compare(truth._replace(values=other), truth, 3)
    assert errors["weights changed"] == 3
    assert all(errors[name] == pytest.approx(scale - 1) for name, scale in scales.items())
    name = "blocks.0.attn2.add_k_proj.weight"
    without = {key: value for key, value in truth.gradients.items() if key != name}
    errors, worst = verify.compare(truth._replace(gradients=without), truth, 0)
    assert errors["each gradient"] == pytest.approx(1) and worst == name, "a missing gradient is 0"
    broken = dict(truth.gradients) | {name: torch.full_like(truth.gradients[name], math.nan)}
    errors, worst = verify.compare(truth._replace(gradients=broken), truth, 0)
    assert errors["each gradient"] == math.inf and worst == name


def _forgets_the_image(monkeypatch):
    def parallelize(self, network, mesh, backend, head_groups):
        original(self, network, mesh, backend, head_groups)
        for block in network.blocks:
            block.attn2.set_processor(_TextAlone(backend))

    original = Wan.parallelize
    monkeypatch.setattr(Wan, "parallelize", parallelize)


class _TextAlone(WanCrossAttention):
    def __call__(self, attn, hidden_states, text, *rest):
        blind = text.clone()
        blind[:, :-512] = 0
        return super().__call__(attn, hidden_states, blind, *rest)


def _rank_result_without_images(case, scratch):
    with pytest.MonkeyPatch.context() as patch:
        _forgets_the_image(patch)
        return verify.rank_result(case, scratch)


@slow
def test_an_attention_that_forgets_the_image_ends_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(verify, "rank_result", _rank_result_without_images)
    verify.write_example(tmp_path / "network", "wan", Wan().examples()["i2v"])
    assert verify.main([str(tmp_path / "network"), "--ranks", "1"]) == 1
    assert "1 x 1" in capsys.readouterr().out
