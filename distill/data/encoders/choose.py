"""Encoders of a folder. The class of its VAE decides the family; a folder with a word table has that."""

from pathlib import Path

from distill.data.encoders.folder import check_weight_files, part_settings, require_class
from distill.data.encoders.hunyuan import HunyuanEncoderFolder
from distill.data.encoders.ltx import LtxEncoderFolder
from distill.data.encoders.ltx2 import Ltx2EncoderFolder
from distill.data.encoders.minimax_h3 import MiniMaxH3EncoderFolder
from distill.data.encoders.wan import EncoderFolder
from distill.data.encoders.words import WordFolder, WordTable, table_file
from fsdp_cp.errors import UserError
from models.families.diffusers_family import checked_arguments
from models.files.shipped import find_shipped

FAMILIES = {
    kind.codec_class.vae_class: kind
    for kind in (EncoderFolder, LtxEncoderFolder, Ltx2EncoderFolder, MiniMaxH3EncoderFolder, HunyuanEncoderFolder)
}
"""Kinds of pipeline folders, by the class of their VAE."""


def choose_encoders(path: str | Path) -> EncoderFolder:
    """Read a pipeline folder's settings without loading weights."""
    if table_file(path).is_file():
        width = WordTable(path).vectors.shape[1]
        return WordFolder(path=find_shipped(path), channels=3, temporal=1, spatial=1, patch=(1, 1, 1), text_width=width)
    import diffusers

    folder, where = find_shipped(path), f"data.encoders={path}"
    if not folder.is_dir():
        raise UserError(f"{where} is not a folder; give a diffusers pipeline folder")
    vae = part_settings(folder, "vae", where)
    vae_class = require_class(where, "vae", [vae.get("_class_name")], " or ".join(FAMILIES))
    family = FAMILIES[vae_class]
    for part in (*family.codec_parts, *family.text_parts):
        if not (folder / part).is_dir():
            raise UserError(f"{where} has no {part}/; give a diffusers pipeline folder that has one")
        if part.startswith("tokenizer"):
            for name in ("tokenizer_config.json", "config.json"):
                part_settings(folder, part, where, name, optional=True)
        else:
            check_weight_files(folder / part, where)
    text = part_settings(folder, "text_encoder", where)
    wanted = family.text_class.stored_class or family.text_class.class_name
    require_class(where, "text_encoder", text.get("architectures"), wanted)
    vae = checked_arguments(getattr(diffusers, vae_class), vae, f"{where}: vae/config.json")
    return family.read(folder, where, vae, text)
