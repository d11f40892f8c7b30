"""Teacher, student and fake score networks built from diffusers classes."""

import logging
import warnings
from functools import partial


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(beginning)


# Filter warnings that libraries print in every run and that need no action.
# torchao 0.18, which diffusers 0.42 and transformers 5 import: its GPU libraries do not load without a GPU, torch 2.13
# deprecates one of its calls, and diffusers does not find tensor classes that it has moved.
for _name, _beginning in {
    "torchao": "Failed to load ",
    "torchao.kernel.intmm": "Warning: Detected no triton",
    "torch.utils._pytree": "%s is an Enum subclass",
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}.items():
    logging.getLogger(_name).addFilter(partial(_begins_otherwise, _beginning))
# FSDP2 of torch 2.13: an in-place operation on the output would skip a gather. Roles make none.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
