"""Encoders of a folder. The class of its VAE decides the family; a folder with a word table has that."""

from __future__ import annotations

from pathlib import Path

from distill.data.encoders.hunyuan import HUNYUAN_VAE_CLASS, HunyuanTextEncoder, inspect_hunyuan
from distill.data.encoders.ltx import LTX_VAE_CLASS, LtxTextEncoder, inspect_ltx
from distill.data.encoders.wan import TEXT_CLASS, VAE_CLASS, EncoderFolder, inspect_wan, read_encoders
from distill.data.encoders.words import inspect_words, table_file

_ENCODERS = {
    VAE_CLASS: (TEXT_CLASS, inspect_wan),
    LTX_VAE_CLASS: (LtxTextEncoder.class_name, inspect_ltx),
    HUNYUAN_VAE_CLASS: (HunyuanTextEncoder.class_name, inspect_hunyuan),
}
"""Class of the text encoder that belongs to a VAE's class, and the function that reads the folder's settings."""


def choose_encoders(path: str | Path) -> EncoderFolder:
    """Read a pipeline folder's settings without loading weights.

    Raises: ``UserError`` as :func:`distill.data.encoders.wan.read_encoders`, and for settings that no such VAE
    has.
    """
    if table_file(path).is_file():
        return inspect_words(path)
    folder, where, vae, text = read_encoders(path, {name: text for name, (text, _) in _ENCODERS.items()})
    return _ENCODERS[vae["_class_name"]][1](folder, where, vae, text)
