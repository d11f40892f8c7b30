"""Networks in the names of Wan's and Lightricks' own code: read from one file or from parts, and written back."""

import json

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fsdp_cp.errors import UserError
from models.export import RoleExport
from models.families.base import config_of
from models.families.ltx2 import LTX2
from models.families.wan import Wan
from models.files import originals_ltx2
from models.files.checkpoint_files import defining, tensor_reader
from models.files.originals import RELEASED, configure, own_config, own_names
from models.lora.merge import Weights
from models.roles.role_plan import plan_role
from tests.tiers import parametrize
from tests.unit.refused import refusal

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16,
        "text_dim": 8, "in_channels": 4, "out_channels": 4, "cross_attn_norm": True}  # fmt: skip


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Wan().build(TINY | {"image_dim": 10, "added_kv_proj_dim": 24, "in_channels": 12}, "architecture")


def written(network, file, prefix="", **header):
    """Write the network as one file in its own names."""
    tensors = network.state_dict()
    own = own_names(tensors)
    save_file({prefix + own[name]: tensor.contiguous() for name, tensor in tensors.items()}, file, header or None)
    return file


def check(plan, network):
    (folder,) = plan.folders
    read = tensor_reader(folder)
    assert plan.config == {"_class_name": type(network).__name__} | defining(config_of(network))
    for name, tensor in network.state_dict().items():
        assert torch.equal(read(name), tensor), name


def exported(family, network, folder):
    """Export the network in its own names; return the file."""
    tensors = network.state_dict()
    weights = Weights({name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__)
    config = {"_class_name": family.class_name} | defining(config_of(network))
    export = RoleExport(family=family, config=config, trained={0: weights}, bases=lambda: [weights])
    export.write(folder, family.name, dtype=torch.float32, about={})
    (file,) = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize("name", sorted(Wan.planning.networks))
def test_released_networks_are_known_by_their_shapes(name):
    with torch.device("meta"):
        network = Wan().build(dict(Wan.planning.networks[name]), "architecture")
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    own = own_names(shapes)
    assert len({*own.values()}) == len(shapes)
    by_own = {own[name]: shape for name, shape in shapes.items()}
    found, wanted = configure(by_own, None, "FILE"), defining(config_of(network))
    assert {key: found.get(key, wanted[key]) for key in wanted} == wanted
    for changed in ("blocks.0.ffn.0.weight", "patch_embedding.weight"):
        other = by_own | {changed: (by_own[changed][0] + 8, *by_own[changed][1:])}
        if changed.startswith("patch"):
            assert str(by_own[changed][0] + 8) in refusal(configure, other, None, "FILE"), "its shapes"
        else:
            assert configure(other, None, "FILE")["ffn_dim"] == by_own[changed][0] + 8
    assert configure(by_own, own_config(wanted), "FILE") == found


def test_the_table_has_every_published_network():
    keys = set()
    for settings in Wan.planning.networks.values():
        network = {"num_attention_heads": 40, "in_channels": 16, "out_channels": 16} | settings
        width = 128 * network["num_attention_heads"]
        keys.add((network["num_layers"] if "num_layers" in network else 40, width, network["in_channels"],
                  network["out_channels"], "image_dim" in network))  # fmt: skip
    assert keys == RELEASED.keys()


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_one_file_with_a_configuration(network, tmp_path, prefix):
    """The user's configuration comes first, then the header's, then Wan's own next to the file."""
    file, settings = tmp_path / "wan.safetensors", defining(config_of(network))
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(json.dumps(settings))
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")  # a neighbor is not read
    written(network, file, prefix)
    assert "24" in refusal(plan_role, "teacher", checkpoint=str(file))
    check(plan_role("teacher", checkpoint=str(file), config=str(tmp_path / "given")), network)
    (tmp_path / "config.json").write_text(json.dumps(own_config(settings)))
    check(plan_role("teacher", checkpoint=str(file)), network)
    (tmp_path / "config.json").write_text(json.dumps({"num_heads": 3}))
    assert plan_role("teacher", checkpoint=str(file)).config["num_attention_heads"] == 3
    written(network, file, prefix, config=json.dumps({"transformer": settings}))
    check(plan_role("teacher", checkpoint=str(file)), network)


def test_parts_with_an_index_in_a_folder(network, tmp_path):
    whole = load_file(written(network, tmp_path / "whole.safetensors"))
    (tmp_path / "whole.safetensors").unlink()
    names, parts = sorted(whole), [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, part in enumerate(parts):
        save_file({name: whole[name] for name in names[i::2]}, tmp_path / part)
    index = {"weight_map": {name: parts[i % 2] for i, name in enumerate(names)}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(own_config(defining(config_of(network)))))
    check(plan_role("teacher", checkpoint=str(tmp_path)), network)


def test_a_whole_network_is_exported_to_its_own_names(network, tmp_path):
    file = exported(Wan(), network, tmp_path / "out")
    assert {"blocks.1.cross_attn.norm_k_img.weight", "head.modulation", "img_emb.proj.0.bias"} <= load_file(file).keys()
    for place in (file, file.parent):
        check(plan_role("teacher", checkpoint=str(place)), network)


def test_other_files_are_refused(network, tmp_path):
    file = written(network, tmp_path / "wan.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(own_config(defining(config_of(network)))))
    whole = load_file(file)

    def refused(tensors):
        save_file(tensors, file)
        return refusal(plan_role, "teacher", checkpoint=str(file))

    assert "F8_E4M3" in refused(whole | {"head.head.weight": whole["head.head.weight"].to(torch.float8_e4m3fn)})
    assert "vace" in refused(whole | {"vace_blocks.0.before_proj.weight": torch.ones(2)})
    refused({name: tensor for name, tensor in whole.items() if name != "blocks.1.ffn.2.bias"})
    (tmp_path / "config.json").unlink()
    assert "ROLE.config" in refused({"double_blocks.0.img_attn.qkv.weight": torch.ones(2, 2)})
    with pytest.raises(UserError):
        own_config(TINY | {"rope_max_seq_len": 32})


@pytest.fixture(scope="module", params=[name for name in LTX2().examples() if "patches" not in name])
def ltx2(request):
    torch.manual_seed(0)
    return LTX2().build(LTX2().examples()[request.param], "architecture")


def test_a_file_of_lightricks_is_read_and_written(ltx2, tmp_path):
    """Its other networks are left out; names are those that diffusers converts (0.42 forgets the prompt's embedder)."""
    file = exported(LTX2(), ltx2, tmp_path / "out")
    with safe_open(file, "pt") as opened:
        header, whole = opened.metadata(), load_file(file)
    tensors = ltx2.state_dict()
    theirs = {name.replace("prompt_adaln_single", "prompt_adaln"): x
              for name, x in convert_ltx2_transformer_to_diffusers(dict(whole)).items()}  # fmt: skip
    assert theirs.keys() == tensors.keys() and all(torch.equal(theirs[name], x) for name, x in tensors.items())
    others = ("vae.x", "vocoder.x", "text_embedding_projection.x", "model.diffusion_model.video_embeddings_connector.x")
    save_file(whole | {name: torch.ones(1, dtype=torch.int64) for name in others}, file, header)
    check(plan_role("teacher", checkpoint=str(file), family="ltx2"), ltx2)
    check(plan_role("teacher", checkpoint=str(file.parent), family="ltx2"), ltx2)


def test_other_files_of_lightricks_are_refused(ltx2, tmp_path):
    settings = {"_class_name": LTX2.class_name} | defining(config_of(ltx2))
    with pytest.raises(UserError):
        originals_ltx2.own_config(settings | {"patch_size": 2})
    file = exported(LTX2(), ltx2, tmp_path / "out")
    own = originals_ltx2.own_config(settings)

    def refused(**changes):
        save_file(
            load_file(file), tmp_path / "file.safetensors", {"config": json.dumps({"transformer": own | changes})}
        )
        return refusal(plan_role, "teacher", checkpoint=str(tmp_path / "file.safetensors"), family="ltx2")

    refused(ff_bias=not own["ff_bias"])
    assert "3 numbers" in refused(positional_embedding_max_pos=[20])
    refused(apply_gated_attention=not own["apply_gated_attention"])  # the other version
    (file.parent / "config.json").unlink()
    save_file(load_file(file), file)
    assert "ROLE.config" in refusal(plan_role, "teacher", checkpoint=str(file), family="ltx2")


@parametrize("name", sorted(LTX2.planning.networks), quick=1)
def test_a_released_ltx2_needs_no_header(name):
    with torch.device("meta"):
        network = LTX2().build(dict(LTX2.planning.networks[name]), "architecture")
    shapes = originals_ltx2.own_names(network.state_dict())
    by_own = {
        own.removeprefix(originals_ltx2.PREFIX): tuple(network.get_parameter(n).shape) for n, own in shapes.items()
    }
    found, wanted = originals_ltx2.configure(by_own, None, "FILE"), defining(config_of(network))
    assert {key: found.get(key, wanted[key]) for key in wanted} == wanted
