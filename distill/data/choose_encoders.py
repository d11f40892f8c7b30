"""The encoders of a pipeline folder, whatever its family: the class of its VAE decides whose they are."""

from __future__ import annotations

from pathlib import Path

from distill.data.encoders import TEXT_CLASS, VAE_CLASS, EncoderFolder, inspect_wan, read_encoders
from distill.data.hunyuan_encoders import HUNYUAN_VAE_CLASS, HunyuanTextEncoder, inspect_hunyuan
from distill.data.ltx_encoders import LTX_VAE_CLASS, LtxTextEncoder, inspect_ltx

_CLASSES = {
    VAE_CLASS: TEXT_CLASS,
    LTX_VAE_CLASS: LtxTextEncoder.class_name,
    HUNYUAN_VAE_CLASS: HunyuanTextEncoder.class_name,
}
"""Of VAEs, and of the text encoder of each."""
_INSPECT = {VAE_CLASS: inspect_wan, LTX_VAE_CLASS: inspect_ltx, HUNYUAN_VAE_CLASS: inspect_hunyuan}


def choose_encoders(path: str | Path) -> EncoderFolder:
    """Read a pipeline folder's settings without loading weights.

    Raises: ``UserError`` as :func:`distill.data.encoders.read_encoders`, and for settings that the VAE's class has not.
    """
    folder, where, vae, text = read_encoders(path, _CLASSES)
    return _INSPECT[vae["_class_name"]](folder, where, vae, text)
