"""Comparison of one step on several local processes with the same step on one process, tensor by tensor."""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_cp.context_parallel import output_values, parallelize_context, read_plan
from fsdp_cp.errors import UserError
from fsdp_cp.mesh import Mesh, build_mesh
from fsdp_cp.runtime.local_ranks import RankPool
from fsdp_cp.sequence import local_token_count
from fsdp_cp.sequence_lengths import entered

Build = Callable[[Mesh], nn.Module]


class ParallelMismatch(ValueError):
    """Difference between the parallel and the plain step. The message names the first tensor that differs."""


def check_parallel(
    model: nn.Module | Build,
    plan: Mapping[str, Any],
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    prepare: Callable[[nn.Module, Mesh], None] | None = None,
    cp: Sequence[int] = (2, 3),
    tolerance: float = 1e-6,
) -> dict[int, float]:
    """Compare one step of ``model``, parallelized by ``plan``, with the plain step: outputs and all gradients.

    The step runs in float64 on the CPU, in new gloo processes, with a ring of ``cp`` ranks (a ring works with any
    number of heads). It needs neither a process group nor a GPU, and changes neither ``model`` nor the random state.
    Use two small layers, and token counts that ``cp`` does not divide. The loss is a random projection of all outputs.

    In a script, call this function below ``if __name__ == "__main__"``.

    Args:
        model: a module that can be pickled; each sub-module with an attribute ``mesh`` gets the mesh there. Or an
            importable function (no lambda, no closure) that takes the mesh and returns the module. ``torch`` is seeded
            before each call; the function must return the same weights each time.
        plan: plan of :func:`fsdp_cp.context_parallel.parallelize_context`.
        inputs: keyword arguments of the forward, or a sequence of positional ones. Every rank gets all of them.
        prepare: importable function, called with the module and the mesh before the plan is applied, at ``cp=1`` too;
            for diffusers' networks :func:`fsdp_cp.context.diffusers_attention.parallelize_attention`.
        cp: numbers of ranks.
        tolerance: largest relative error, by norm (see :func:`gradient_errors`).

    Returns:
        The largest error of an output or a gradient for each ``cp``.

    Raises:
        ParallelMismatch: an output or a gradient differs, or the parallel step fails (its error is then the cause).
            The message names the first tensor that differs: outputs of sub-modules in the order of the forward (if
            their shapes show how to gather them), then gradients.
        UserError: invalid arguments.
        ValueError: the plan does not fit the model.
        RuntimeError: the plain step fails; the message has its traceback.
    """
    sizes = tuple(cp) if isinstance(cp, Sequence) else (cp,)
    if not callable(model):
        raise UserError("model must be a module, or a function of the mesh that builds it")
    if not isinstance(inputs, (Mapping, Sequence)):
        raise UserError("inputs must be a dict of keyword arguments, or a tuple")
    if not sizes or not all(isinstance(size, int) and size > 1 for size in sizes):
        raise UserError("cp must be integers of at least 2")
    if not isinstance(tolerance, (int, float)) or not tolerance > 0:
        raise UserError("tolerance must be a relative error above 0")
    if isinstance(model, nn.Module):
        read_plan(model, plan)  # find a misspelled name before starting processes
    worst: dict[int, float] = {}
    for size in sizes:
        with RankPool(size, timeout=120.0, preload=("torch", "fsdp_cp")) as pool:
            (plain, *_) = _run(pool, model, plan, inputs, prepare, 1)
            try:
                ranks = _run(pool, model, plan, inputs, prepare, size)
            except RuntimeError as error:
                line = str(error).strip().splitlines()[-1]
                raise ParallelMismatch(f"cp={size}: the parallel step fails: {line}") from error
        worst[size] = _compare(plain, ranks, size, tolerance)
    return worst


def relative_error(value: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Return ``|value - truth|`` by ``|truth|`` or ``floor``, the larger; infinite for other shapes and for NaN."""
    if value.shape != truth.shape:
        return float("inf")
    difference, norm = (value - truth).norm().item(), max(truth.norm().item(), floor)
    if difference == 0:
        return 0.0
    return difference / norm if norm and difference == difference else float("inf")


def gradient_errors(values: Mapping[str, Tensor | None], truths: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return each gradient's relative error, with a floor of 1e-6 of the norm of all; a missing one counts as 0."""
    whole = sum(truth.norm().item() ** 2 for truth in truths.values() if truth is not None) ** 0.5
    errors = {}
    for name in truths.keys() | values.keys():
        value, truth = values.get(name), truths.get(name)
        if (known := value if truth is None else truth) is not None:
            zero = torch.zeros_like(known)
            pair = (zero if value is None else value, zero if truth is None else truth)
            errors[name] = relative_error(*pair, 1e-6 * whole)
    return errors


def _run(pool: RankPool, model, plan, inputs, prepare, cp: int) -> list[dict[str, Any]]:
    try:
        return pool.run(_step, model, plan, inputs, prepare, cp)
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # pickle raises any of these
        advice = "use importable functions, and a model without a mesh or a function that builds it"
        raise UserError(f"model, plan, inputs and prepare must be picklable ({error}); {advice}") from error


def _step(model, plan, inputs, prepare, cp: int) -> dict[str, Any]:
    """Run a forward and backward on one rank; return each module's outputs and the rank's gradients."""
    mesh = build_mesh(cp=cp, ring=cp, dp_shard=-1)
    torch.manual_seed(0)
    model = model if isinstance(model, nn.Module) else model(mesh)
    for module in model.modules():
        if hasattr(module, "mesh"):
            module.mesh = mesh
    nn.Module.double(model)  # the method that diffusers overrides leaves parts in fp32
    if prepare is not None:
        prepare(model, mesh=mesh)
    parallelize_context(model, mesh=mesh, plan=plan)
    seen, totals = _watch(model)
    inputs = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, copy.deepcopy(inputs))
    output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    values = _floats(output)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in values)
    if not isinstance(loss, Tensor) or loss.grad_fn is None:
        raise ValueError("check_parallel needs a model that returns a tensor with gradients")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"outputs": [x.detach() for x in values], "seen": seen, "gradients": gradients, "totals": totals}


def _watch(model: nn.Module) -> tuple[list[tuple[str, Tensor]], set[int]]:
    """Return collections that the next forward fills: modules' outputs in order of return, and split token counts."""
    seen: list[tuple[str, Tensor]] = []
    totals: set[int] = set()

    def note(name: str) -> Callable:
        def hook(_module, _args, output) -> None:
            for record in entered():
                totals.update(record.totals.values())
            values = _floats(output)
            for i, x in enumerate(values):
                seen.append((f"output {i} of {name!r}" if len(values) > 1 else f"the output of {name!r}", x.detach()))

        return hook

    for name, module in model.named_modules():
        if name:  # the output of the whole model is compared separately
            module.register_forward_hook(note(name))
    return seen, totals


def _floats(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a module's output. ``output_values`` opens what pytree cannot flatten."""
    leaves = tree_leaves(output_values(output)[0])
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _compare(plain: dict[str, Any], ranks: list[dict[str, Any]], cp: int, tolerance: float) -> float:
    outputs, several = plain["outputs"], len(plain["outputs"]) > 1
    floor = 1e-6 * sum(x.norm().item() ** 2 for x in outputs) ** 0.5
    errors = {}
    for i, truth in enumerate(outputs):
        name = f"output {i} of the model" if several else "the output of the model"
        errors[name] = max(relative_error(rank["outputs"][i], truth, floor) for rank in ranks)
    summed: dict[str, Tensor | None] = {}
    for name in plain["gradients"]:
        shares = [rank["gradients"][name] for rank in ranks if rank["gradients"][name] is not None]
        summed[name] = torch.stack(shares).sum(0) if shares else None
    gradients = gradient_errors(summed, plain["gradients"])
    errors |= {f"the gradient of {name!r}": gradients[name] for name in summed if name in gradients}
    worst = max(errors.values())
    if worst <= tolerance:
        return worst
    # Compare intermediate outputs only if the step differs: they may differ in a correct step.
    differing = itertools.chain(_differing_modules(plain, ranks, cp), errors.items())
    name, error = next((name, error) for name, error in differing if not error <= tolerance)
    raise ParallelMismatch(f"cp={cp}: {name} is off by {error:.1e} (relative), more than tolerance={tolerance:g}")


def _differing_modules(plain, ranks, cp: int) -> Iterator[tuple[str, float]]:
    """Yield the error of each sub-module's output, in the order of the forward."""
    if any([name for name, _ in rank["seen"]] != [name for name, _ in plain["seen"]] for rank in ranks):
        return  # the ranks called modules in another order, so outputs cannot be paired
    for i, (name, truth) in enumerate(plain["seen"]):
        candidates = _gathered([rank["seen"][i][1] for rank in ranks], truth, ranks[0]["totals"], cp)
        yield name, min((relative_error(x, truth) for x in candidates), default=0.0)


def _gathered(outputs: list[Tensor], truth: Tensor, totals: set[int], cp: int) -> Iterator[Tensor]:
    """Yield each tensor that the ranks' ``outputs`` may form: a replica, or the tokens of up to 3 sequences."""
    if any(x.shape != outputs[0].shape or x.ndim != truth.ndim for x in outputs):
        return
    other = [dim for dim in range(truth.ndim) if outputs[0].shape[dim] != truth.shape[dim]]
    if not other:
        yield max(outputs, key=lambda x: relative_error(x, truth))
    if len(other) != 1:
        return
    (dim,) = other
    for n in (1, 2, 3):
        for segments in itertools.product(sorted(totals), repeat=n):
            counts = [local_token_count(segment, cp) for segment in segments]
            if sum(segments) == truth.shape[dim] and sum(counts) == outputs[0].shape[dim]:
                shares_of_segments = zip(*(x.split(counts, dim) for x in outputs), strict=True)
                whole = (torch.cat(shares, dim) for shares in shares_of_segments)
                yield torch.cat([x.narrow(dim, 0, total) for x, total in zip(whole, segments, strict=True)], dim)
