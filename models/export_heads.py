"""Export of a student with heads (models/additions/heads.py) for a number S of sampling steps, as plain last layers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.additions.base import network_tensors
from models.additions.heads import NAME, Grid
from models.families.base import LastLayer
from models.files.checkpoint_files import HEADS_FILE
from models.lora.merge import Weights
from models.owner import PREFIX

NOTE = f'''This network makes a clip in {{steps}} steps, each with last layers of its own. {HEADS_FILE} holds their
weights `(steps, out, in)` and biases, and a plain pipeline loads the network without them. This function,
`use_heads(pipeline.transformer, "{HEADS_FILE}")`, switches them at each call of the network. Sample without
guidance, so that a step is one call:

```python
from safetensors.torch import load_file
from torch.nn.functional import linear

def use_heads(transformer, file):
    heads, calls = load_file(file), {{{{}}}}
    def switched(name, layer, inputs, output):
        weight, bias = (heads[f"{{{{name}}}}.heads.{{{{kind}}}}"].to(output.device) for kind in ("weight", "bias"))
        step = calls[name] = (calls.get(name, -1) + 1) % len(weight)
        return linear(inputs[0].to(weight.dtype), weight[step], bias[step]).to(output.dtype)
    for name in {{{{key.partition(".heads.")[0] for key in heads}}}}:
        hook = lambda *call, name=name: switched(name, *call)
        transformer.get_submodule(name).register_forward_hook(hook)
```
'''
"""Text of the export's notes, with the number of ``steps`` to insert."""


def fused_heads(network: Weights, layers: Mapping[str, LastLayer], grid: Grid, steps: int) -> Weights:
    """Return the last layers of each of ``steps`` steps, fp32: ``LAYER.heads.weight`` ``(S, out, in)`` and
    ``LAYER.heads.bias``, names that the network's own files in the folder do not have.

    ``network`` has the network's own tensors, with the adapters merged, and the differences of its heads.
    """
    rows = grid.mean(*grid.blocks(steps))
    kinds = ("weight", "bias")
    of_part = {f"{layer.name}.heads.{kind}": (part, kind) for part, layer in layers.items() for kind in kinds}

    def read(name: str) -> Tensor:
        part, kind = of_part[name]
        base = network.read(name.replace(".heads.", "."))
        differences = network.read(f"{PREFIX}{NAME}.{part}.{kind}")
        weights = torch.tensor(rows[part], dtype=torch.float32, device=differences.device)
        return base.to(differences) + torch.tensordot(weights.to(differences), differences, dims=1)

    return Weights({name: (steps, *network.shapes[name.replace(".heads.", ".")]) for name in of_part}, read)


def without_heads(network: Weights, heads: Weights) -> Weights:
    """Return the plain network whose last layers are the one of each of ``heads``."""

    def read(name: str) -> Tensor:
        layer, _, kind = name.rpartition(".")
        own = f"{layer}.heads.{kind}"
        return heads.read(own)[0] if own in heads.shapes else network.read(name)

    return Weights(network_tensors(network.shapes), read)
