"""LayerBalance: learning rates by layer, from the spectra of the weights (TempBalance and the methods after it).

The weights of an unevenly trained network differ in how heavy the tails of their spectra are. Each is measured by one
exponent, alpha; a rule turns the exponents into factors of the learning rate or the weight decay. `rule="report"`
changes nothing and only reports them.

    step n * every    the weights are measured, in a thread, each matrix on one rank
    next multiple     the result counts: it is reported, and the factors begin to move to its own
    ramp              steps in which they get there

Rules of this file:
1. The optimizer's learning rates are those of the schedule at all times but during `Optimizer.step`: a hook multiplies
   them before it, and puts them back after it. Schedulers that compute the next rate from the last one would multiply
   the factor again in every step.
2. A result counts at a step that is known in advance, never when it happens to be ready: the same run gives the same
   factors, and so does one that is resumed.
3. All ranks have the same factors, bit for bit: those of the owner of each matrix.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn

from overlord.companions import spectra
from overlord.companions.balance_rules import PUBLISHED, Float64s, Rule, linear, ramped, sigmoid
from overlord.companions.measured import LEAST_SIDE, Measured, Scope, Weights, models_of, units_of, weights_of
from overlord.companions.sharded import Pieces, Ranks, gather, pieces_of
from overlord.errors import SpecError, StateError

logger = logging.getLogger("overlord")

_STATE_FIELDS = {
    "rule", "step", "names", "shapes", "units", "alphas", "pending", "measured_at", "begin", "target", "ramp_from",
}  # fmt: skip
MOST_NAMES = 64
"""Metrics that are reported at most: they are kept with every report of the run."""


class LayerBalance:
    """Measures the spectra of a model's weights every few steps, and balances its layers by them.

    Args:
        model: The model, or its parts on this rank as pipeline parallel trainers have them.
        optimizer: The optimizer that trains it, or the optimizers of its parts; those that wrap one (of Accelerate,
            Megatron, torchtitan) are unwrapped. Rules that change something need groups from `balance_groups`.
        rule: "report" measures only. "llr" scales learning rates from 1 to 5 (pre-training), "tempbalance" from 0.5 to
            1.5, "sigmoid" by TB_Sigmoid (fine-tuning on little data); "alphadecay" scales the weight decay.
        every: Steps between two measurements.
        ramp: Steps in which factors move to new ones; by default half of `every`, at most 50. 0: at once.
        scope: What shares one factor, as in `balance_groups`; by default what the groups of the optimizer say.
        limits: The smallest and the largest factor, for the rules that map linearly.
        tau: How steep the sigmoid is; "sigmoid" only.
        strength: The exponents of 10 below and above the mean; "sigmoid" only.
        xmin_pos: Which part of the eigenvalues is the tail: the largest 1 / xmin_pos are not, as in the published code.
        windows: "farms" measures square windows of each matrix, so that shapes compare; None whole matrices. By default
            as the rule was published.
        against: "random" subtracts the exponent that an untrained matrix of the same shape has; None nothing.
        trim: The part of both ends that is clipped before a linear map, against outliers.
        decay: Whether weight decay, which the learning rate multiplies, follows its factor or stays fixed.
        warmup: Measurements before this step are reported, and change nothing.
        least: The short side that a matrix has at least.
        fused: Sizes of the parts of fused weights, by the end of their names: `{"qkv_proj": (4096, 1024, 1024)}`. Those
            of known names are cut by the model's configuration.
        group: The process group of all ranks that have parts of the model; by default all ranks.

    Every rank makes one, after the model is sharded and before its first step.

    Example:
        ::

            optimizer = torch.optim.AdamW(balance_groups(model), lr=3e-4)
            balance = LayerBalance(model, optimizer, rule="llr", every=100, ramp=50)
            for step in loader:
                ...
                optimizer.step()
                schedule.step()
                loader.report(step.index, losses | balance.metrics())
    """

    def __init__(  # noqa: PLR0913 - the front door: everything has a default and a name
        self,
        model: nn.Module | Iterable[nn.Module],
        optimizer: Any,
        rule: Rule = "report",
        *,
        every: int = 100,
        ramp: int | None = None,
        scope: Scope | None = None,
        limits: tuple[float, float] | None = None,
        tau: float | None = None,
        strength: tuple[float, float] | None = None,
        xmin_pos: float | None = None,
        windows: Literal["farms", "default"] | None = "default",
        against: Literal["random"] | None = None,
        trim: float = 0.0,
        decay: Literal["follows", "fixed"] = "follows",
        warmup: int = 0,
        least: int = LEAST_SIDE,
        fused: Mapping[str, Sequence[int]] | None = None,
        group: Any = None,
    ) -> None:
        _check_options(rule, every, ramp, limits, tau, strength, xmin_pos, windows, against, trim, decay, warmup, least)
        published = PUBLISHED[rule]
        self.rule: Rule = rule
        self.every = every
        self._ramp = min(every // 2, 50) if ramp is None else ramp
        self._limits = limits or published.limits
        self._tau = 10.0 if tau is None else tau
        self._strength = strength or (1.0, 1.0)
        self._xmin_pos = published.xmin_pos if xmin_pos is None else xmin_pos
        self._windowed = published.windows and against is None if windows == "default" else windows == "farms"
        self._against = against
        self._trim, self._decay, self._warmup = trim, decay, warmup
        if against is not None and self._windowed:
            raise SpecError(
                "against='random' and windows='farms' are both given; square windows have the same limit for all "
                "weights, so nothing would be left to subtract. Give one of the two."
            )

        models = models_of(model)
        weights = weights_of(models, fused, least)
        self._ranks = Ranks(group)
        self._optimizers = torch_optimizers(optimizer)
        self._groups = _Groups(self._optimizers, weights, rule, decay, published.knob)
        # A stage with one matrix in each block cannot tell the scope; another one can.
        scopes = self._ranks.everyones(scope or self._groups.finest_scope(weights))
        self._groups.divide_by("block" if "block" in scopes else "matrix", weights)
        self._parameters: dict[str, torch.Tensor] = {
            weight.name: weights.parameters[weight.name] for weight in weights.measured
        }
        self._pieces = pieces_of(weights.measured, self._parameters, self._ranks)
        if not self._pieces:
            raise SpecError(
                f"the model has no trained matrix with a side of {least} or more; there is nothing to measure. Give "
                "the model that is trained, or a smaller least=."
            )
        # The weights and embeddings of all stages: the factors of one depend on the exponents of all.
        edges = [name for names in self._ranks.everyones(weights.edges) for name in names]
        self._weights: tuple[Measured, ...] = tuple(piece.weight for piece in self._pieces)
        all_units = units_of(Weights(self._weights, tuple(dict.fromkeys(edges)), {}), self._groups.scope)
        self._unit_of: dict[str, str] = all_units
        self._units: list[str] = list(dict.fromkeys(all_units.values()))
        self._edges = frozenset(edges)

        self._step = 0
        self._alphas: Float64s | None = None
        """By weight, the last measurement that counts; NaN where a weight cannot be measured."""
        self._pending: Future[Float64s] | Float64s | None = None
        """What this rank measured of it, or, after a state was loaded, all of it."""
        self._measured_at = 0
        self._begin = np.ones(len(self._units))
        self._target = np.ones(len(self._units))
        self._ramp_from = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="overlord-spectra")
        self._hooks = self._add_hooks()

    # -- what users read ----------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps so far, without those that a gradient scaler skipped."""
        return self._step

    def metrics(self) -> dict[str, float]:
        """Return the last measurement that counts: "alpha/mean" and "alpha/std" over blocks, and those of blocks.

        At most 64 names: blocks are averaged with their neighbours where there are more. Empty before the first
        measurement counts, which is at step `every`.
        """
        if self._alphas is None:
            return {}
        blocks: dict[str, list[float]] = {}
        for weight, alpha in zip(self._weights, self._alphas.tolist(), strict=True):
            if math.isfinite(alpha):
                blocks.setdefault(weight.block, []).append(alpha)
        means = {block: float(np.mean(some)) for block, some in blocks.items()}
        if not means:
            return {"alpha/unmeasured": float(len(self._weights))}
        values = list(means.values())
        summary = {"alpha/mean": float(np.mean(values)), "alpha/std": float(np.std(values))}
        unmeasured = int(np.isnan(self._alphas).sum())
        if unmeasured:
            summary["alpha/unmeasured"] = float(unmeasured)
        return summary | _at_most(means, MOST_NAMES - len(summary))

    def alphas(self) -> dict[str, float]:
        """Return the exponent of every weight, as of the last measurement that counts; NaN where it has none."""
        return {} if self._alphas is None else dict(zip(self._names, self._alphas.tolist(), strict=True))

    def factors(self) -> dict[str, float]:
        """Return the factor of every matrix or block in the next step."""
        return dict(zip(self._units, self._current().tolist(), strict=True))

    def measure(self) -> dict[str, float]:
        """Measure now and return the exponent of every weight; it changes nothing. Every rank calls it."""
        mine = _measured(self._gathered(), self._alpha, len(self._pieces))
        return dict(zip(self._names, self._ranks.shared(mine).tolist(), strict=True))

    def close(self) -> None:
        """Remove the hooks, after which the optimizer is as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._groups.restore()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with: the same on every rank, and for any number of them.

        Where several ranks train, every rank calls it, as with `torch.distributed.checkpoint`: a measurement that is
        under way is finished and exchanged.
        """
        self._pending = self._collected()
        return {
            "rule": self.rule,
            "step": self._step,
            "names": list(self._names),
            "shapes": [list(weight.shape) for weight in self._weights],
            "units": list(self._units),
            "alphas": None if self._alphas is None else self._alphas.tolist(),
            "pending": None if self._pending is None else self._pending.tolist(),
            "measured_at": self._measured_at,
            "begin": self._begin.tolist(),
            "target": self._target.tolist(),
            "ramp_from": self._ramp_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks.

        Raises:
            StateError: It is damaged, or of another model, rule or scope; nothing has changed then.
        """
        _check_state(state, self.rule, list(self._names), [list(w.shape) for w in self._weights], self._units)
        self._step, self._measured_at = int(state["step"]), int(state["measured_at"])
        self._alphas, self._pending = _floats(state["alphas"]), _floats(state["pending"])
        self._begin = np.asarray(state["begin"], np.float64)
        self._target = np.asarray(state["target"], np.float64)
        self._ramp_from = int(state["ramp_from"])

    # -- steps --------------------------------------------------------------------------------------------

    def _add_hooks(self) -> list[Any]:
        first, last = self._optimizers[0], self._optimizers[-1]
        hooks = [first.register_step_pre_hook(lambda *_: self._before_first())]
        for optimizer in self._optimizers:
            hooks.append(optimizer.register_step_pre_hook(lambda used, *_: self._groups.apply(used, self.factors())))
            hooks.append(optimizer.register_step_post_hook(lambda used, *_: self._groups.restore(used)))
        hooks.append(last.register_step_post_hook(lambda used, *_: self._after(used)))
        return hooks

    def _before_first(self) -> None:
        if self._step == 0 and self._pending is None:
            self._start()

    def _after(self, optimizer: Any) -> None:
        skipped = getattr(optimizer, "found_inf", None)
        # A fused optimizer takes part in what a gradient scaler skips: its step ran, and changed nothing.
        if skipped is None or not bool(skipped.item()):
            self._count()

    def _count(self) -> None:
        self._step += 1
        if self._step % self.every == 0:
            self._turn()

    def _turn(self) -> None:
        """Let the last measurement count, and begin the next one."""
        arrived = self._collected()
        if arrived is not None:
            self._alphas = arrived
            if self._measured_at >= self._warmup:
                self._begin, self._ramp_from = self._current(), self._step
                self._target = self._factors_of(arrived)
        self._start()

    def _current(self) -> Float64s:
        return ramped(self._begin, self._target, self._step - self._ramp_from, self._ramp)

    def _factors_of(self, alphas: Float64s) -> Float64s:
        """Return the factor of each unit; 1 for those that cannot be measured."""
        by_unit: dict[str, list[float]] = {}
        for weight, alpha in zip(self._weights, alphas.tolist(), strict=True):
            if math.isfinite(alpha):
                by_unit.setdefault(self._unit_of[weight.name], []).append(alpha)
        values = np.array([float(np.mean(some)) for some in by_unit.values()])
        if self.rule == "report" or not len(values):
            return np.ones(len(self._units))
        if self.rule == "sigmoid":
            factors = sigmoid(values, tau=self._tau, below=self._strength[0], above=self._strength[1])
        else:
            factors = linear(values, *self._limits, trim=self._trim)
        table = dict(zip(by_unit, factors.tolist(), strict=True))
        edge = self._limits[1] if PUBLISHED[self.rule].edges == "largest" else 1.0
        return np.array([edge if unit in self._edges else table.get(unit, 1.0) for unit in self._units])

    # -- measuring ----------------------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(weight.name for weight in self._weights)

    def _gathered(self) -> list[tuple[int, Pieces, torch.Tensor]]:
        mine = [(at, piece) for at, piece in enumerate(self._pieces) if piece.owner == self._ranks.rank]
        whole = gather(self._pieces, self._parameters, self._ranks)
        return [(at, piece, weight) for (at, piece), weight in zip(mine, whole, strict=True)]

    def _start(self) -> None:
        """Begin to measure the weights as they are now; training goes on meanwhile, and changes them."""
        _refuse_meta(self._parameters)
        self._measured_at = self._step
        copies = self._gathered()
        stream = _side_stream(copies)

        def measured() -> Float64s:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                return _measured(copies, self._alpha, len(self._pieces))

        self._pending = self._thread.submit(measured)

    def _collected(self) -> Float64s | None:
        """Return the measurement that was begun last, of all ranks."""
        if not isinstance(self._pending, Future):
            return self._pending
        return self._ranks.shared(self._pending.result())

    def _alpha(self, weight: Measured, whole: torch.Tensor) -> float:
        """Return the exponent of a weight: the mean over the parts of a fused one, and over experts."""
        values: list[float] = []
        for part in weight.parts(whole):
            matrices = part if part.ndim == 3 else part[None]
            if weight.kind == "conv":  # the eigenvalues of all its matrices are pooled
                values.append(float(spectra.alpha(spectra.pooled_eigenvalues(matrices), self._xmin_pos)))
                continue
            for matrix in matrices:
                values.append(self._alpha_of(matrix))
        finite = [value for value in values if math.isfinite(value)]
        return float(np.mean(finite)) if finite else math.nan

    def _alpha_of(self, matrix: torch.Tensor) -> float:
        if self._windowed:
            return float(spectra.alpha(spectra.window_eigenvalues(matrix), self._xmin_pos))
        value = float(spectra.alpha(spectra.eigenvalues(matrix), self._xmin_pos))
        if self._against == "random":
            value -= spectra.random_limit(matrix.shape[0], matrix.shape[1], self._xmin_pos)
        return value


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch within one, or within those of a list: only their steps run hooks.

    Raises:
        SpecError: There is none.
    """
    if isinstance(optimizer, (list, tuple)):
        return [inner for each in optimizer for inner in torch_optimizers(each)]
    for name in ("chained_optimizers", "optimizers"):  # Megatron's, torchtitan's
        if isinstance(getattr(optimizer, name, None), (list, tuple)):
            return torch_optimizers(getattr(optimizer, name))
    if getattr(optimizer, "optimizer", None) is not None:  # Accelerate's, Lightning's, one of Megatron's
        return torch_optimizers(optimizer.optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"optimizer is {type(optimizer).__name__}, which is no torch.optim.Optimizer and wraps none; its steps "
            "could not be counted. Pass the optimizer that trains the model, or a list of them."
        )
    return [optimizer]


class _Groups:
    """The parameter groups of the optimizers: which unit each belongs to, and what it has instead while it steps."""

    def __init__(
        self,
        optimizers: Sequence[Any],
        weights: Weights,
        rule: Rule,
        decay: Literal["follows", "fixed"],
        knob: str,
    ) -> None:
        self._optimizers = list(optimizers)
        self._knob, self._decay, self._changes = knob, decay, rule != "report"
        self._names = {id(parameter): name for name, parameter in weights.parameters.items()}
        self._names |= {
            id(parameter.main_param): name
            for name, parameter in weights.parameters.items()
            if getattr(parameter, "main_param", None) is not None
        }
        self._saved: dict[int, list[tuple[dict[str, Any], str, Any]]] = {}
        self._check_weights(weights)
        self.scope: Scope = "matrix"
        self._unit_of: dict[str, str] = {}

    def divide_by(self, scope: Scope, weights: Weights) -> None:
        """Take the groups for those of this scope.

        Raises:
            SpecError: Weights of several units are in one group, and the rule needs them apart.
        """
        self.scope, self._unit_of = scope, units_of(weights, scope)
        if self._changes:
            self._check_groups()

    def apply(self, optimizer: Any, factors: Mapping[str, float]) -> None:
        """Multiply the knob of each group for one step."""
        self.restore(optimizer)  # a step that raised has not put them back
        if not self._changes:
            return
        saved = self._saved.setdefault(id(optimizer), [])
        _own_rates(optimizer.param_groups)
        for group in optimizer.param_groups:
            factor = factors.get(self._unit(group), 1.0)
            if factor == 1.0:
                continue
            if self._knob == "lr":
                saved.append(_multiplied(group, "lr", factor))
                if self._decay == "fixed" and group.get("weight_decay"):
                    saved.append(_multiplied(group, "weight_decay", 1 / factor))
            else:
                saved.append(_multiplied(group, "weight_decay", factor))

    def restore(self, optimizer: Any = None) -> None:
        """Put back what the groups had; of all optimizers without one."""
        for key in list(self._saved) if optimizer is None else [id(optimizer)]:
            for group, name, value in self._saved.pop(key, []):
                if isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _unit(self, group: Mapping[str, Any]) -> str:
        """Return the unit of a group, by its parameters: positions and keys may come from another run's state."""
        for parameter in group["params"]:
            return self._unit_of.get(self._names.get(id(parameter), ""), "")
        return ""

    def _check_weights(self, weights: Weights) -> None:
        trained = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        missing = [
            weight.name
            for weight in weights.measured
            if id(weights.parameters[weight.name]) not in trained
            and id(getattr(weights.parameters[weight.name], "main_param", None)) not in trained
        ]
        if missing and len(missing) == len(weights.measured):
            raise SpecError(
                f"none of the model's weights is in the optimizer ({missing[0]!r} is not, among {len(missing)}); what "
                "is measured would not be what is trained. Pass the model whose parameters the optimizer has, after it "
                "was sharded and before its first forward pass."
            )
        if missing:
            raise SpecError(
                f"{len(missing)} trained weights are not in the optimizer, {missing[0]!r} among them; they would be "
                "measured and never change. Freeze them with requires_grad_(False), or add them to the optimizer."
            )

    def finest_scope(self, weights: Weights) -> Scope:
        """Return the finest scope that the groups allow."""
        blocks = {weight.name: weight.block for weight in weights.measured}
        for group in self._groups():
            names = [self._names.get(id(parameter), "") for parameter in group["params"]]
            if len({name for name in names if name in blocks}) > 1:
                return "block"
        return "matrix"

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _check_groups(self) -> None:
        for number, group in enumerate(self._groups()):
            names = [self._names.get(id(parameter), "") for parameter in group["params"]]
            units = sorted({self._unit_of.get(name, "") for name in names})
            if len(units) > 1:
                shown = ", ".join(repr(unit) if unit else "others" for unit in units[:3])
                raise SpecError(
                    f"parameter group {number} of the optimizer has weights of {len(units)} units ({shown}), which "
                    f"need factors of their own (scope {self.scope!r}); they could not differ. Make the optimizer with "
                    f"balance_groups(model, scope={self.scope!r}), which divides groups= that you have."
                )
            if self._knob == "weight_decay" and "weight_decay" not in group:
                raise SpecError(
                    "the rule 'alphadecay' scales weight decay, and the optimizer has none; it would do nothing. Use "
                    "an optimizer with weight_decay, such as torch.optim.AdamW, or another rule."
                )
        if self._knob == "weight_decay" and not any(group["weight_decay"] for group in self._groups()):
            raise SpecError(
                "the rule 'alphadecay' scales weight decay, which is 0 in every group; it would do nothing. Set "
                "weight_decay of the optimizer, or use another rule."
            )
        for optimizer in self._optimizers:
            coupled = isinstance(optimizer, (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)) and not any(
                group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
                for group in optimizer.param_groups
            )
            if self._decay == "fixed" and coupled:
                raise SpecError(
                    f"decay='fixed' with {type(optimizer).__name__}, whose weight decay is part of the gradient and "
                    "not multiplied by the learning rate; nothing is to be divided out. Use AdamW, or decay='follows'."
                )


def _own_rates(groups: Sequence[dict[str, Any]]) -> None:
    """Give each group a learning rate tensor of its own: torch gives all groups the one that it was passed."""
    seen: set[int] = set()
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            if id(rate) in seen:
                group["lr"] = rate.clone()
            seen.add(id(group["lr"]))


def _multiplied(group: dict[str, Any], name: str, factor: float) -> tuple[dict[str, Any], str, Any]:
    """Multiply a value of a group, in place where it is a tensor; return how to put it back."""
    value = group[name]
    if isinstance(value, torch.Tensor):
        saved = group, name, value.clone()
        value.mul_(factor)  # another object, or another number, would compile a compiled step anew
        return saved
    group[name] = value * factor
    return group, name, value


def _measured(mine: list[tuple[int, Pieces, torch.Tensor]], alpha: Any, count: int) -> Float64s:
    """Return the exponents of the weights that this rank owns, NaN for all others; the list is emptied."""
    values = np.full(count, math.nan)
    while mine:
        at, piece, weight = mine.pop(0)  # its memory is free once it is measured
        values[at] = alpha(piece.weight, weight)
        if math.isnan(values[at]):
            logger.debug("the weight %r cannot be measured; its factor is 1", piece.weight.name)
    return values


def _side_stream(copies: Sequence[tuple[int, Pieces, torch.Tensor]]) -> Any:
    """Return a stream that measures beside training, once what was copied is there; None on a processor."""
    device = next((weight.device for _, _, weight in copies), None)
    if device is None or device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    for _, _, weight in copies:
        weight.record_stream(stream)
    return stream


def _refuse_meta(parameters: Mapping[str, torch.Tensor]) -> None:
    name = next((name for name, parameter in parameters.items() if parameter.device.type == "meta"), None)
    if name is not None:
        raise SpecError(
            f"the weight {name!r} is on the meta device and has no values; it could not be measured. Load or "
            "initialise the weights before the first step."
        )


def _at_most(means: Mapping[str, float], most: int) -> dict[str, float]:
    """Return the exponents of blocks, runs of neighbours averaged where there are too many."""
    names, run = list(means), -(-len(means) // most)
    runs = [names[first : first + run] for first in range(0, len(names), run)]
    return {
        f"alpha/{some[0] if len(some) == 1 else f'{some[0]}..{some[-1]}'}": float(np.mean([means[n] for n in some]))
        for some in runs
    }


def _floats(values: Sequence[float] | None) -> Float64s | None:
    return None if values is None else np.asarray(values, np.float64)


def _check_state(state: object, rule: Rule, names: list[str], shapes: list[list[int]], units: list[str]) -> None:
    if not isinstance(state, Mapping) or not set(state) >= _STATE_FIELDS:
        raise StateError(
            "load_state_dict: this is no state of LayerBalance; nothing was loaded. Pass what its state_dict returned."
        )
    saved = cast("Mapping[str, Any]", state)
    if saved["rule"] != rule:
        raise StateError(
            f"load_state_dict: the state is of the rule {saved['rule']!r}, and this is {rule!r}; its factors would "
            "mean something else. Make LayerBalance with the rule of the saved run, or begin without its state."
        )
    if list(saved["names"]) != names or [list(shape) for shape in saved["shapes"]] != shapes:
        theirs = [f"{n} {tuple(s)}" for n, s in zip(saved["names"], saved["shapes"], strict=True)]
        here = [f"{n} {tuple(s)}" for n, s in zip(names, shapes, strict=True)]
        raise StateError(
            "load_state_dict: the state is of other weights; factors would go to the wrong ones. Only in the state: "
            f"{_listed(theirs, here)}. Only in this model: {_listed(here, theirs)}. Load the state of this model, with "
            "the same fused= and least=."
        )
    if list(saved["units"]) != units:
        raise StateError(
            f"load_state_dict: the state has factors for {len(saved['units'])} units, such as {saved['units'][0]!r}, "
            f"and here they are for {len(units)}, such as {units[0]!r}; they would go to the wrong weights. Make the "
            "groups of the optimizer with the scope of the saved run."
        )
    lengths = {name: len(units) for name in ("begin", "target")} | {
        name: len(names) for name in ("alphas", "pending") if saved.get(name) is not None
    }
    if any(len(saved[name]) != length for name, length in lengths.items()):
        raise StateError(
            "load_state_dict: the state is damaged, its lists have other lengths than its names; nothing was loaded. "
            "Load an earlier checkpoint."
        )


def _listed(some: Sequence[str], others: Sequence[str]) -> str:
    only = [name for name in some if name not in set(others)]
    if not only:
        return "the same in another order" if sorted(some) == sorted(others) else "none"
    return ", ".join(only[:8]) + (f" and {len(only) - 8} more" if len(only) > 8 else "")


def _check_options(  # noqa: PLR0913 - the options of LayerBalance
    rule: object, every: object, ramp: object, limits: Any, tau: Any, strength: Any, xmin_pos: Any, windows: object,
    against: object, trim: Any, decay: object, warmup: object, least: object,
) -> None:  # fmt: skip
    """Refuse what is wrong or would do nothing, before a model is looked at."""

    def refuse(name: str, value: object, remedy: str) -> SpecError:
        return SpecError(f"LayerBalance: {name} is {value!r:.80}. {remedy}")

    if rule not in PUBLISHED:
        raise refuse("rule", rule, f"Write one of {', '.join(map(repr, PUBLISHED))}.")
    for name, value, smallest in (("every", every, 1), ("warmup", warmup, 0), ("least", least, 3)):
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise refuse(name, value, f"Write a whole number of {smallest} or more.")
    if ramp is not None and (not isinstance(ramp, int) or not 0 <= ramp <= cast("int", every)):
        raise refuse("ramp", ramp, f"Write a whole number of steps up to every={every}.")
    changes = {"llr", "tempbalance", "alphadecay"}
    if limits is not None and (rule not in changes or len(limits) != 2 or not 0 < limits[0] <= limits[1] < math.inf):
        raise refuse("limits", limits, "Write two factors above 0, the smaller first; only linear rules take them.")
    if tau is not None and (rule != "sigmoid" or not 0 < tau < math.inf):
        raise refuse("tau", tau, "Write a number above 0; only rule='sigmoid' takes it.")
    if strength is not None and (rule != "sigmoid" or len(strength) != 2 or not all(0 <= s <= 6 for s in strength)):
        raise refuse("strength", strength, "Write two exponents of 10 from 0 to 6; only rule='sigmoid' takes them.")
    if xmin_pos is not None and not 1 < xmin_pos <= 100:
        raise refuse("xmin_pos", xmin_pos, "Write a number above 1, such as 2 for the upper half of the eigenvalues.")
    if windows not in ("farms", "default", None):
        raise refuse("windows", windows, "Write 'farms', or None for whole matrices.")
    if against not in ("random", None):
        raise refuse("against", against, "Write 'random' or None.")
    if not 0 <= trim < 0.5 or (trim and rule not in changes):
        raise refuse("trim", trim, "Write a share from 0 to below 0.5, such as 0.05; only linear rules take it.")
    if decay not in ("follows", "fixed") or (decay == "fixed" and rule in ("report", "alphadecay")):
        raise refuse("decay", decay, "Write 'follows', or 'fixed' with a rule that changes learning rates.")
