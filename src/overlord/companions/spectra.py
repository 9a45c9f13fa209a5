"""Spectra of weight matrices, and the power-law exponent alpha of their tails.

    eigenvalues      of the Gram matrix of a weight's short side: its squared singular values, ascending
    alpha            PL_Alpha_Hill of a spectrum, as TempBalance, Model Balancing, AlphaDecay and LLR compute it
    windows          square windows of a weight (FARMS), whose pooled spectrum does not depend on the weight's shape
    conv_matrices    the matrices of a convolution
    random_limit     alpha of a random matrix: what an untrained weight of a shape has

Eigenvalues come from `eigvalsh` of the Gram matrix and not from `svdvals`: on a GPU that is nine times as fast, and the
default driver of `svdvals` there errs in the fourth digit of alpha.

A spectrum that cannot be measured (not finite, no tail, too few eigenvalues) has the alpha NaN. Nothing is raised for
it, since one bad matrix must not stop a run. What would be wrong at every step (a type, a shape) raises SpecError.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import torch

from overlord.errors import SpecError

FixFingers = Literal["xmin_mid", "xmin_peak"]
"""How `alpha` chooses x_min, the eigenvalue where the tail begins, by the names of the published code."""

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The types of weights that have a spectrum."""

ZERO = 1e-5
"""`filter_zeros` drops eigenvalues up to this one, as the published code does (`EVALS_THRESH`)."""

FLAT = 1e-12
"""A mean of ln(e / x_min) up to this one is rounding: all eigenvalues of the tail are equal, and it has no exponent."""

FEWEST = 3
"""The least number of eigenvalues that have an alpha."""

BINS = 100
"""Bins of the histogram whose peak `xmin_peak` looks for."""

# float64 at half the rate of float32: P100, V100, A100, H100 and H200, B200. All other compute capabilities (8.6, 8.9,
# 10.3 and 12.0 among them) have a sixteenth of it or less.
_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}

# Matrices of a batch are solved together up to this number of elements: 1 GiB of float64.
_ELEMENTS = 1 << 27

# Candidates for x_min are compared together up to this number of distances: 32 MiB of float64, a few times.
_DISTANCES = 1 << 22


def solver_type(device: torch.device | str) -> torch.dtype:
    """Return the type in which `eigenvalues` solves on a device: float64 where that is fast, else float32.

    The compute capability of a GPU decides, as torch has no property for the rate of float64. On ROCm the capability is
    that of the gfx name, and gfx9 (MI200, MI300) is fast. Devices other than CPUs and CUDA have no solver, and their
    weights are solved on the CPU.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float64
    major, minor = torch.cuda.get_device_capability(device)
    fast = major == 9 if torch.version.hip else (major, minor) in _FAST_FLOAT64
    return torch.float64 if fast else torch.float32


@torch.no_grad()
def eigenvalues(weight: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the eigenvalues of the Gram matrix of a weight's short side, ascending.

    They are the squares of the singular values. Those that are zero but for rounding are zero. A matrix that the solver
    fails on is solved once more, in float64 on the CPU. If that fails too, or its elements are not finite, its
    eigenvalues are NaN.

    Args:
        weight: A matrix [rows, columns], or a batch of them [matrices, rows, columns] such as the experts of a layer.
        dtype: The type to solve in, float32 or float64 (default: that of `solver_type`). The Gram matrix is computed in
            float64 in any case, so that neither TF32 nor autocast changes it.

    Returns:
        [n] or [matrices, n] with n = min(rows, columns), in the type solved in, on the device of the weight (on the CPU
        where that has no solver).

    Raises:
        SpecError: The weight is no dense matrix of real floating-point elements that are here.
    """
    _check(weight, (2, 3), "a matrix [rows, columns] or a batch of matrices; convolutions pass through conv_matrices")
    kind = solver_type(weight.device) if dtype is None else dtype
    if kind not in (torch.float32, torch.float64):
        raise SpecError(f"spectra: dtype is {kind}, which no solver has. Use torch.float64 or torch.float32.")
    if weight.device.type not in ("cpu", "cuda"):
        weight = weight.cpu()
    if weight.ndim == 2:
        return _retried(weight.unsqueeze(0), kind)[0]
    at_once = max(1, _ELEMENTS // max(1, weight.shape[1] * weight.shape[2]))
    return torch.cat([_retried(part, kind) for part in weight.split(at_once)])


def pooled_eigenvalues(matrices: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the eigenvalues of all matrices of a batch [matrices, rows, columns] as one ascending spectrum."""
    return eigenvalues(matrices, dtype=dtype).flatten().sort().values


def _check(weight: torch.Tensor, dims: tuple[int, ...], shape: str) -> None:
    """Refuse what has no spectrum, or another than its elements show."""
    if not isinstance(weight, torch.Tensor):
        raise SpecError(f"spectra: the weight is a {type(weight).__name__}, not a tensor. Pass a parameter of a model.")
    # Of DTensors, torchao's and Transformer Engine's quantised tensors, fake tensors: all of them show another type or
    # shape than they hold.
    if type(weight).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise SpecError(
            f"spectra: the weight is a {type(weight).__name__}, whose values are sharded, quantised or absent; a part "
            "or a code would be measured in place of the matrix. Pass all of it as a plain tensor: full_tensor() of "
            "a DTensor, dequantize() of a quantised one."
        )
    what = f"spectra: the weight {list(weight.shape)} of type {weight.dtype}"
    if weight.is_meta:
        raise SpecError(f"{what} is on the meta device and has no values. Measure after the model is materialised.")
    if weight.dtype not in TYPES:
        types = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES)
        raise SpecError(
            f"{what} holds codes that are scaled elsewhere, or no real numbers, so its spectrum is not the layer's. "
            f"Dequantise it or leave it out; the types are {types}."
        )
    if weight.layout is not torch.strided:
        raise SpecError(f"{what} is {weight.layout}, and the solver takes dense matrices. Use to_dense(), or omit it.")
    if weight.ndim not in dims:
        raise SpecError(
            f"{what} is not {shape}. Leave vectors out, and pass flat parameters as the matrices that they hold."
        )


def _retried(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Solve a batch, then those that failed once more, each alone: one matrix fails a whole batch in `eigvalsh`."""
    values = _solved(weight, kind)
    for failed in values.isfinite().all(-1).logical_not().nonzero().flatten().tolist():
        values[failed] = _solved(weight[failed].cpu(), torch.float64)
    return values


def _solved(weight: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    weight = weight.to(torch.float64)
    short = weight if weight.shape[-2] <= weight.shape[-1] else weight.mT
    gram = (short @ short.mT).to(kind)
    # Solvers raise, hang or corrupt memory on elements that are not finite: they get zeros instead.
    broken = gram.isfinite().flatten(-2).all(-1).logical_not().unsqueeze(-1)
    gram.masked_fill_(broken.unsqueeze(-1), 0.0)
    try:
        values = torch.linalg.eigvalsh(gram)
    except torch.linalg.LinAlgError:
        return torch.full(gram.shape[:-1], math.nan, dtype=kind, device=gram.device)
    # Eigenvalues that are zero come out as rounding errors of the largest, of either sign. If they stayed, the tail of
    # a matrix of low rank would be measured against rounding errors, and its alpha would be near 1.
    values = values.clamp_min(0.0)
    noise = values[..., -1:] * (torch.finfo(kind).eps * math.sqrt(values.shape[-1]))
    return values.masked_fill(values <= noise, 0.0).masked_fill(broken, math.nan)


def alpha(
    eigenvalues: torch.Tensor,
    xmin_pos: float = 2,
    *,
    fix_fingers: FixFingers = "xmin_mid",
    filter_zeros: bool = False,
) -> float | torch.Tensor:
    """Return PL_Alpha_Hill, the exponent of a power law fitted to the tail of a spectrum.

    With N eigenvalues e, ascending, i = int(N / xmin_pos) and k = N - i::

        alpha = 1 + k / (sum of ln(e_j / e_i) for j >= i)

    This is the published code. It counts x_min = e_i among the k, where the papers' estimator has one term less.

    Args:
        eigenvalues: A spectrum [n], or several [spectra, n].
        xmin_pos: Where the tail begins: 2 takes the upper half, 1.5 (Model Balancing) the upper third.
        fix_fingers: "xmin_mid" as above. "xmin_peak" tries all x_min about the peak of the spectrum, and takes the one
            whose power law has the least Kolmogorov-Smirnov distance to its tail; it does not use `xmin_pos`, and its
            time grows with the square of n.
        filter_zeros: Leave eigenvalues up to 1e-5 out, unless all are.

    Returns:
        A float for one spectrum; for several a float64 tensor [spectra] on their device. NaN where alpha cannot be
        measured: fewer than 3 eigenvalues, x_min zero or not finite, a tail of equal eigenvalues.

    Raises:
        SpecError: An argument is out of range.
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64).detach()
    if values.ndim not in (1, 2):
        raise SpecError(f"spectra.alpha: the shape {list(values.shape)} is neither one spectrum [n] nor [spectra, n].")
    if fix_fingers not in get_args(FixFingers):
        raise SpecError(f"spectra.alpha: fix_fingers is {fix_fingers!r}; write one of {list(get_args(FixFingers))}.")
    _check_position(xmin_pos)
    rows = (values if values.ndim == 2 else values.unsqueeze(0)).sort(-1).values
    count = rows.shape[1]
    if count < FEWEST:
        fits = rows.new_full((len(rows),), math.nan)
    else:
        # What is filtered is the beginning of each row.
        first = (rows <= ZERO).sum(1) if filter_zeros else torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        first = first.masked_fill(first == count, 0)
        fits = _mid(rows, first, xmin_pos) if fix_fingers == "xmin_mid" else _peaks(rows, first)
    return float(fits) if values.ndim == 1 else fits


def _check_position(xmin_pos: float) -> None:
    if not 1 < xmin_pos < math.inf:
        raise SpecError(
            f"spectra: xmin_pos is {xmin_pos}, so the tail would be empty or the whole spectrum. Use 2 for the upper "
            "half, or another finite number above 1."
        )


def _mid(values: torch.Tensor, first: torch.Tensor, xmin_pos: float) -> torch.Tensor:
    """Return alpha of each row from its place `first` on, where x_min has a fixed place."""
    size = values.shape[1] - first
    start = first + (size.double() / xmin_pos).long()  # not size / xmin_pos, which would be float32
    logs, place = values.log(), torch.arange(values.shape[1], device=values.device)
    floor = logs.gather(1, start.unsqueeze(1))
    mean = (logs - floor).where(place >= start.unsqueeze(1), 0.0).sum(1) / (values.shape[1] - start)
    measured = (size >= FEWEST) & floor.squeeze(1).isfinite() & mean.isfinite() & (mean > FLAT)
    return (1 + 1 / mean).where(measured, math.nan)


def _peaks(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    rows = [_peak(row[begin:]) for row, begin in zip(values, first.tolist(), strict=True)]
    return torch.stack(rows).to(values.device) if rows else values.new_empty(0)


def _peak(spectrum: torch.Tensor) -> torch.Tensor:
    """Return alpha of an ascending spectrum, on the CPU, for the x_min with the least distance.

    Distances, n^2 of them, are computed on the device of the spectrum. All else is small, and sums of a CUDA device in
    another order would make alpha differ between two runs.
    """
    values, nothing = spectrum.cpu(), torch.tensor(math.nan, dtype=torch.float64)
    count, positive = len(values), values > 0
    scale = values[positive].log10()
    if count < FEWEST or not values.isfinite().all() or not len(scale) or scale[0] == scale[-1]:
        return nothing
    low, high = scale[0], scale[-1]
    bins = ((scale - low) * BINS / (high - low)).long().clamp_max(BINS - 1)
    peak = 10 ** (low + (high - low) * torch.bincount(bins, minlength=BINS).argmax() / BINS)
    # The lower bound compares an eigenvalue with a logarithm, as all published code since WeightWatcher does. Where the
    # peak is below 1 it is negative and bounds nothing. It stays, as alphas would not be comparable without it.
    candidate = positive & (values >= (0.95 * peak).log10()) & (values <= 1.5 * peak)
    logs, tail = values.log(), count - torch.arange(count)
    # The largest eigenvalue has a mean of zero, so it is no candidate.
    mean = logs.flip(0).cumsum(0).flip(0) / tail - logs
    starts = (candidate & mean.isfinite() & (mean > FLAT)).nonzero().flatten()
    if not len(starts):
        return nothing
    fits, some = 1 + 1 / mean[starts], max(1, _DISTANCES // count)
    parts = zip(*(each.to(spectrum.device).split(some) for each in (fits, starts)), strict=True)
    return fits[int(torch.cat([ks_distance(spectrum, *part) for part in parts]).argmin())]


def ks_distance(values: torch.Tensor, fits: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the Kolmogorov-Smirnov distances of power laws to the tails they are fitted to, as the authors do.

    Args:
        values: An ascending spectrum [n].
        fits: The exponents of power laws [fits].
        starts: The place of the x_min of each of them in the spectrum [fits].
    """
    place = torch.arange(len(values), device=values.device) - starts.unsqueeze(1)
    law = 1 - (values / values[starts].unsqueeze(1)) ** (1 - fits).unsqueeze(1)
    gaps = (law - place / (len(values) - starts).double().unsqueeze(1)).abs()
    return gaps.where(place >= 0, 0.0).amax(1)


def windows(weight: torch.Tensor, size: int = 100, count: int = 9) -> torch.Tensor:
    """Return square windows of a matrix at regular steps, as FARMS samples them.

    The defaults are those of FARMS for image models; for LLaMA it takes windows of 2000, 15 along each side.

    Args:
        weight: A matrix [rows, columns], or a batch of them.
        size: The side of a window; at most the short side of the matrix is used.
        count: The most windows along each side. Steps are whole numbers, so the last rows and columns may be in no
            window.

    Returns:
        A view [.., windows down, windows across, size, size].

    Raises:
        SpecError: There is no such window.
    """
    _check(weight, (2, 3), "a matrix [rows, columns] or a batch of matrices")
    if size < 1 or count < 1 or not weight.numel():
        raise SpecError(
            f"spectra.windows: {count} windows a side of size {size} cannot be cut from a weight {list(weight.shape)}. "
            "Use numbers of at least 1, and a matrix that is not empty."
        )
    rows, columns = weight.shape[-2:]
    size = min(size, rows, columns)
    down, across = (max(1, (side - size) // max(1, count - 1)) for side in (rows, columns))
    # unfold moves the elements of a window to the end, so the dimension to cut is always the last but one.
    return weight.detach().unfold(-2, size, down).unfold(-2, size, across)[..., :count, :count, :, :]


def window_eigenvalues(
    weight: torch.Tensor, size: int = 100, count: int = 9, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the eigenvalues of all windows of a matrix as one ascending spectrum.

    All windows have one aspect ratio, so the alpha of this spectrum does not depend on the shape of the weight.

    Args:
        weight: A matrix, or a batch of matrices.
        size: As for `windows`.
        count: As for `windows`.
        dtype: As for `eigenvalues`.

    Returns:
        [n], or [matrices, n] for a batch.
    """
    view = windows(weight, size, count)
    if weight.ndim == 3:
        return torch.stack([window_eigenvalues(matrix, size, count, dtype=dtype) for matrix in weight])
    # One row of windows at a time: all of them have many times the elements of the matrix.
    return torch.cat([eigenvalues(row, dtype=dtype).flatten() for row in view]).sort().values


def conv_matrices(weight: torch.Tensor, factor: float = math.sqrt(0.5)) -> torch.Tensor:
    """Return the matrices [places, out, in] of a convolution: one for each place of its kernel, times a factor.

    The spectrum of the layer is that of all of them: `pooled_eigenvalues(conv_matrices(weight))`.

    Args:
        weight: The weight of a convolution [out, in, *kernel].
        factor: The norm of the published code (`conv_norm` 0.5, whose root it takes).

    Raises:
        SpecError: The weight is that of no convolution.
    """
    _check(weight, (3, 4, 5), "that of a convolution [out, in, *kernel]")
    exact = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().flatten(2).permute(2, 0, 1).to(exact) * factor


def random_limit(rows: int, columns: int, xmin_pos: float = 2) -> float:
    """Return the limit of alpha ("xmin_mid") for matrices of independent Gaussian elements, as they grow in this shape.

    An untrained weight has this alpha at any scale: 2.12 if it is square, 3.45 at 4:1.

    Args:
        rows: Rows of the weight.
        columns: Columns of the weight.
        xmin_pos: As for `alpha`.

    Raises:
        SpecError: An argument is out of range.
    """
    if rows < 1 or columns < 1:
        raise SpecError(f"spectra.random_limit: there is no matrix of {rows} x {columns}. Use sides of at least 1.")
    _check_position(xmin_pos)
    ratio = min(rows, columns) / max(rows, columns)
    # The Marchenko-Pastur law over the angle t of x = 1 + ratio + 2 sqrt(ratio) cos t. Its density there is
    # 2 sin(t)^2 / (pi x), smooth at both ends; over x it is infinite at 0 if the matrix is square. Midpoints of t, from
    # the largest x down.
    edges = np.linspace(0.0, np.pi, (1 << 14) + 1)
    x = 1 + ratio + 2 * math.sqrt(ratio) * np.cos((edges[1:] + edges[:-1]) / 2)
    share = 2 * np.sin((edges[1:] + edges[:-1]) / 2) ** 2 / (np.pi * x) * np.diff(edges)
    above, logs = (np.concatenate([[0.0], np.cumsum(each)]) for each in (share, share * np.log(x)))
    tail = 1 - 1 / xmin_pos
    start = float(np.interp(tail, above, edges))
    xmin = 1 + ratio + 2 * math.sqrt(ratio) * math.cos(start)
    return 1 + 1 / (float(np.interp(start, edges, logs)) / tail - math.log(xmin))
