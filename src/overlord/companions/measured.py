"""Which weights of a model are measured, and the parameter groups that let each have a factor of its own.

    Measured         a weight with a spectrum: its name, its block, and where a fused weight is cut
    measured_of      the weights of a model, in its order
    balance_groups   parameter groups for an optimizer: one for each weight or block, and the rest

A fused projection has another aspect ratio and another spectrum than the matrices it consists of, so it is cut before
it is measured. Where the borders cannot be derived from the model's configuration they have to be given: a spectrum of
the wrong matrix looks as plausible as the right one.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from overlord.companions.spectra import conv_matrices
from overlord.errors import SpecError

logger = logging.getLogger("overlord")

Scope = Literal["matrix", "block"]
LEAST_SIDE = 50
"""Smaller matrices have too few eigenvalues for the estimate of a tail: the published methods leave them out, too."""

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)")
_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)\.")
_ADAPTER = re.compile(r"(^|\.)lora_|(^|\.)adapter")
_HALVES = ("gate_up_proj", "gate_up", "linear_fc1", "w13", "up_gate_proj")
_PROJECTIONS = ("qkv_proj", "qkv", "c_attn", "Wqkv", "in_proj_weight", "query_key_value", "linear_qkv", "in_proj_qkv")
_BY_HEAD = ("query_key_value",)
"""Their rows are ordered by head: queries, keys and values of the first head, then of the second."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a fused weight is cut: along a dimension, into parts of these sizes, which repeat in each group of rows."""

    dim: int
    sizes: tuple[int, ...]
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """A weight whose spectrum is measured."""

    name: str
    block: str
    """The name of the block it belongs to; its own where the model has none."""
    shape: tuple[int, ...]
    kind: Literal["matrix", "experts", "conv"]
    cut: Cut | None = None

    def parts(self, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the matrices of a whole weight: each is (rows, columns), or a batch of them."""
        if self.kind == "conv":
            yield conv_matrices(weight)
            return
        if self.cut is None:
            yield weight
            return
        cut = self.cut
        rows = weight.movedim(cut.dim, -2) if cut.dim != weight.ndim - 2 else weight
        lead, columns = rows.shape[:-2], rows.shape[-1]
        grouped = rows.reshape(*lead, cut.groups, -1, columns)
        for part in grouped.split(cut.sizes, dim=-2):
            yield part.reshape(*lead, -1, columns)

    def sides(self) -> Iterator[tuple[int, int, int]]:
        """Yield (matrices, rows, columns) of each part."""
        if self.kind == "conv":
            yield math.prod(self.shape[2:]), self.shape[0], self.shape[1]
            return
        batch = math.prod(self.shape[:-2])
        if self.cut is None:
            yield batch, self.shape[-2], self.shape[-1]
            return
        columns = self.shape[-1] if self.cut.dim == len(self.shape) - 2 else self.shape[-2]
        for size in self.cut.sizes:
            yield batch, size * self.cut.groups, columns

    @property
    def cost(self) -> int:
        """What its eigenvalues cost: the cube of the short side of each matrix."""
        return sum(batch * min(rows, columns) ** 3 for batch, rows, columns in self.sides())


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, by what a rule does with them."""

    measured: tuple[Measured, ...]
    edges: tuple[str, ...]
    """Embeddings and heads: not measured, and treated by each rule in its own way."""
    parameters: Mapping[str, nn.Parameter]
    """All that are trained, by name."""


def clean(name: str) -> str:
    """Return the name of a parameter without the wrappers of torch.compile, checkpointing, FSDP and DDP."""
    return _WRAPPERS.sub(r"\1", name.removeprefix("module.")).replace("..", ".").lstrip(".")


def models_of(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the parts of a model, which pipeline parallel trainers have as a list."""
    return [model] if isinstance(model, nn.Module) else list(model)


def weights_of(
    model: nn.Module | Iterable[nn.Module], fused: Mapping[str, Sequence[int]] | None = None, least: int = LEAST_SIDE
) -> Weights:
    """Return the weights of a model in its order; tied ones count once, frozen ones not at all.

    Args:
        model: The model, or its parts on this rank.
        fused: The sizes of the parts of fused weights, by the end of their names, for those whose borders the model's
            configuration does not tell.
        least: The short side that a matrix has at least.

    Raises:
        SpecError: A weight is flattened by FSDP1, or quantised, or `fused` does not fit.
    """
    parameters: dict[str, nn.Parameter] = {}
    owners: dict[str, tuple[nn.Module, nn.Module]] = {}
    vocabularies: set[int] = set()
    embeddings: set[int] = set()
    for part in models_of(model):
        for path, module in part.named_modules():
            if isinstance(module, nn.Embedding):
                vocabularies.add(module.num_embeddings)
                embeddings.add(id(module.weight))
            for name, _ in module.named_parameters(recurse=False):
                owners.setdefault(clean(f"{path}.{name}" if path else name), (part, module))
        for raw, parameter in part.named_parameters():
            if parameter.requires_grad:
                _check_readable(clean(raw), parameter)
                parameters[clean(raw)] = parameter
    has_blocks = any(_BLOCK.match(name) for name, p in parameters.items() if p.ndim >= 2)
    measured: list[Measured] = []
    edges: list[str] = []
    used: set[str] = set()
    for name, parameter in parameters.items():
        root, module = owners[name]
        block = _BLOCK.match(name)
        if parameter.ndim < 2 or _ADAPTER.search(name):
            continue
        head = isinstance(module, nn.Linear) and module.out_features in vocabularies
        if id(parameter) in embeddings or head or (has_blocks and block is None):
            edges.append(name)
            continue
        kind = _kind(module, parameter)
        if kind is None:
            continue
        cut = None if kind == "conv" else _cut(name, parameter, root, fused or {}, used)
        weight = Measured(name, block.group(1) if block else name, tuple(parameter.shape), kind, cut)
        if all(min(rows, columns) >= least for _, rows, columns in weight.sides()):
            measured.append(weight)
    unused = sorted(set(fused or {}) - used)
    if unused:
        raise SpecError(
            f"fused names {', '.join(map(repr, unused))}, and no trained weight of the model ends so; nothing would be "
            f"cut. The model has {', '.join([w.name for w in measured][:6]) or 'no matrix'}, among others."
        )
    return Weights(tuple(measured), tuple(edges), parameters)


def balance_groups(
    model: nn.Module | Iterable[nn.Module],
    scope: Scope = "matrix",
    *,
    groups: Iterable[Mapping[str, Any]] | None = None,
    fused: Mapping[str, Sequence[int]] | None = None,
    least: int = LEAST_SIDE,
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, in which each matrix or block can have a factor of its own.

    Args:
        model: The model, or its parts on this rank.
        scope: One group for each matrix, or one for each block, which fused optimizers run faster.
        groups: The groups that the optimizer would have otherwise, such as one without weight decay; they are divided
            further and keep their options. Without it: all trained parameters, without options.
        fused: As in `LayerBalance`.
        least: As in `LayerBalance`.

    Returns:
        Groups with "params", the options of their group, and "balance": the name of the matrix, block, embedding or
        head; empty for norms, biases and other parameters whose factor is always 1.

    Example:
        ::

            optimizer = torch.optim.AdamW(balance_groups(model, scope="block"), lr=3e-4)
    """
    if scope not in ("matrix", "block"):
        raise SpecError(f"scope is {scope!r:.80}; parameters could not be grouped. Write 'matrix' or 'block'.")
    weights = weights_of(model, fused, least)
    unit_of = units_of(weights, scope)
    names = {id(parameter): name for name, parameter in weights.parameters.items()}
    base: list[Mapping[str, Any]] = [{"params": list(weights.parameters.values())}] if groups is None else list(groups)
    divided: list[dict[str, Any]] = []
    for group in base:
        options = {key: value for key, value in group.items() if key != "params"}
        by_unit: dict[str, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_unit.setdefault(unit_of.get(names.get(id(parameter), ""), ""), []).append(parameter)
        divided += [{"params": some, "balance": unit, **options} for unit, some in by_unit.items()]
    return divided


def units_of(weights: Weights, scope: Scope) -> dict[str, str]:
    """Return, for each weight by name, the unit that its factor belongs to: itself, or its block."""
    units = {weight.name: weight.name if scope == "matrix" else weight.block for weight in weights.measured}
    return units | {name: name for name in weights.edges}


def _kind(module: nn.Module, parameter: torch.Tensor) -> Literal["matrix", "experts", "conv"] | None:
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv" if not isinstance(module, nn.modules.conv._ConvTransposeNd) else None
    return {2: "matrix", 3: "experts"}.get(parameter.ndim)  # type: ignore[return-value]


def _check_readable(name: str, parameter: torch.Tensor) -> None:
    if type(parameter).__name__ == "FlatParameter" or name.endswith("_flat_param"):
        raise SpecError(
            f"the weight {name!r} is a flat parameter of FSDP1, in which the matrices of several layers lie one after "
            "another; no spectrum could be measured. Shard the model with torch.distributed.fsdp.fully_shard (FSDP2)."
        )
    if parameter.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise SpecError(
            f"the weight {name!r} is trained as {parameter.dtype}; the spectrum of its codes would not be that of the "
            "weight. Give LayerBalance the model with weights of float32, bfloat16 or float16, or freeze this one."
        )


def _cut(
    name: str, parameter: torch.Tensor, root: nn.Module, fused: Mapping[str, Sequence[int]], used: set[str]
) -> Cut | None:
    """Return where a fused weight is cut, None for one that is not fused."""
    stem = name.removesuffix(".weight")
    for ending, sizes in fused.items():
        if stem == ending or stem.endswith("." + ending) or name.endswith("." + ending):
            used.add(ending)
            for dim in (parameter.ndim - 2, parameter.ndim - 1):
                if sum(sizes) == parameter.shape[dim] and all(size > 0 for size in sizes):
                    return Cut(dim, tuple(sizes))
            raise SpecError(
                f"fused[{ending!r}] is {list(sizes)}, which sums to {sum(sizes)}, and {name!r} is "
                f"{tuple(parameter.shape)}; it could not be cut. Give positive sizes that sum to one of its sides."
            )
    last = stem.rpartition(".")[2]
    if last in _HALVES:
        cut = _halves(parameter, getattr(root, "config", None))
    elif last in _PROJECTIONS or name.rpartition(".")[2] in _PROJECTIONS:
        cut = _heads(parameter, getattr(root, "config", None), by_head=last in _BY_HEAD)
    else:
        return None
    if cut is None:
        logger.warning(
            "the weight %r seems to be fused, and the configuration of the model does not say where its parts end; it "
            "is measured as one matrix. Pass fused={%r: (sizes of its parts)}.", name, last
        )  # fmt: skip
    return cut


def _halves(parameter: torch.Tensor, config: Any) -> Cut | None:
    """Return where the gate ends and the up projection begins: in the middle of the hidden dimension."""
    if parameter.ndim == 2:
        return Cut(0, (parameter.shape[0] // 2,) * 2) if parameter.shape[0] % 2 == 0 else None
    inner = {getattr(config, key, None) for key in ("moe_intermediate_size", "intermediate_size")} - {None}
    dims = [dim for dim in (1, 2) if parameter.shape[dim] // 2 in inner and parameter.shape[dim] % 2 == 0]
    return Cut(dims[0], (parameter.shape[dims[0]] // 2,) * 2) if len(dims) == 1 else None


def _heads(parameter: torch.Tensor, config: Any, *, by_head: bool) -> Cut | None:
    """Return where queries, keys and values end, by the numbers of their heads."""
    heads = next((getattr(config, key) for key in ("num_attention_heads", "n_head") if hasattr(config, key)), None)
    if not isinstance(heads, int):
        return None
    shared = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None)
    size = getattr(config, "head_dim", None) or (width // heads if width else None)
    if size is None:
        return None
    sizes = (heads * size, shared * size, shared * size)
    # GPT-2 keeps (in, out); with square weights the first dimension is taken, as in torch.
    dim = next((dim for dim in (0, 1) if parameter.ndim == 2 and parameter.shape[dim] == sum(sizes)), None)
    if dim is None:
        return None
    return Cut(dim, (size,) * 3, heads) if by_head and shared == heads else Cut(dim, sizes)
