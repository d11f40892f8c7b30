"""diffusers networks as roles."""

import logging

# Where torchao is installed, diffusers (0.42) and transformers import it with themselves, and it complains on a CPU of
# its libraries for GPUs, and of functions that torch 2.13 renames: five lines in front of each command's own.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)
