"""Spectra and alphas: closed forms, the limits of random matrices, and the results of the authors' functions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_matrices import matrix

from overlord.companions import spectra
from overlord.errors import SpecError

GOLDEN = json.loads((Path(__file__).parent / "golden_alpha.json").read_text())
LIMITS = {2: {1: 2.1217, 2: 2.7058, 2.667: 2.9911, 4: 3.4546}, 1.5: {1: 2.8345, 2: 3.6096, 2.667: 3.9975, 4: 4.6326}}


def with_spectrum(values: np.ndarray, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a matrix whose squared singular values are these."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((len(values), len(values))))
    right, _ = np.linalg.qr(rng.standard_normal((columns, len(values))))
    return torch.from_numpy(left * np.sqrt(values) @ right.T)


def gaussian(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)))


# Known answers.


@pytest.mark.parametrize("columns", [64, 200])
@pytest.mark.parametrize("ratio", [1.02, 1.15])
def test_a_geometric_spectrum_has_the_alpha_of_its_closed_form(ratio, columns):
    """ln(e_j / e_i) = (j - i) ln r, so its mean over k terms is (k - 1) / 2 ln r."""
    weight = with_spectrum(ratio ** np.arange(64.0), columns)
    for form in (weight, weight.T):
        values = spectra.eigenvalues(form)
        assert values.numpy() == pytest.approx(ratio ** np.arange(64.0), rel=1e-10)
        for position, k in ((2, 32), (1.5, 22), (4, 48)):
            exact = 1 + 2 / ((k - 1) * math.log(ratio))
            assert spectra.alpha(values, xmin_pos=position) == pytest.approx(exact, rel=1e-12)


def test_the_tail_begins_where_the_published_code_begins_it():
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    for position, tail in ((2, [4.0, 8.0, 16.0]), (1.5, [8.0, 16.0]), (4, [2.0, 4.0, 8.0, 16.0])):
        exact = 1 + len(tail) / sum(math.log(value / tail[0]) for value in tail)
        assert spectra.alpha(values, position) == pytest.approx(exact, rel=1e-14)
        assert spectra.alpha(values.flip(0), position) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("position", LIMITS)
@pytest.mark.parametrize("aspect", [1, 2, 2.667, 4])
def test_limits_of_random_matrices_are_those_of_marchenko_and_pastur(position, aspect):
    columns = round(1000 * aspect)
    limit = spectra.random_limit(1000, columns, position)
    assert limit == pytest.approx(LIMITS[position][aspect], abs=1e-4)
    assert limit == spectra.random_limit(columns, 1000, xmin_pos=position)


def test_a_random_matrix_has_the_alpha_of_its_limit():
    for aspect in (1, 2, 2.667, 4):
        values = spectra.eigenvalues(gaussian(1024, round(1024 * aspect)))
        for position, limits in LIMITS.items():
            assert spectra.alpha(values, position) == pytest.approx(limits[aspect], abs=0.02)


@pytest.mark.parametrize("shape", [(512, 512), (512, 1024), (1365, 512), (256, 1024)])
def test_windows_have_one_alpha_for_all_shapes(shape):
    values = spectra.window_eigenvalues(gaussian(*shape), 128)
    assert spectra.alpha(values) == pytest.approx(2.138, abs=0.03)


def test_alpha_does_not_depend_on_the_scale():
    values = spectra.eigenvalues(gaussian(80, 120))
    assert spectra.alpha(values * 1e-9) == pytest.approx(spectra.alpha(values), rel=1e-12)


# The authors' functions.


@pytest.mark.parametrize("entry", GOLDEN["matrices"], ids=lambda entry: f"{entry['recipe']}-{entry['seed']}")
def test_alphas_are_those_of_the_authors(entry):
    weight = matrix(entry)
    assert (weight**2).sum() == pytest.approx(entry["sum_of_squares"], rel=1e-12), "this is another matrix"
    weight = torch.from_numpy(weight)
    if weight.ndim == 4:
        values = spectra.pooled_eigenvalues(spectra.conv_matrices(weight))
    else:
        values = spectra.eigenvalues(weight)
    assert spectra.alpha(values) == pytest.approx(entry["xmin_mid"], abs=1e-10)
    assert spectra.alpha(values, 1.5) == pytest.approx(entry["xmin_mid_third"], abs=1e-10)
    assert spectra.alpha(values, filter_zeros=True) == pytest.approx(entry["xmin_mid_filtered"], abs=1e-10)
    assert spectra.alpha(values, fix_fingers="xmin_peak") == pytest.approx(entry["xmin_peak"], abs=1e-10)


@pytest.mark.parametrize(
    "entry", [entry for entry in GOLDEN["matrices"] if "windows" in entry], ids=lambda entry: entry["seed"]
)
def test_windows_are_those_of_the_authors(entry):
    values = spectra.window_eigenvalues(torch.from_numpy(matrix(entry)), *entry["windows"])
    assert len(values) == entry["window_eigenvalues"]
    assert float(values[-1]) == pytest.approx(entry["window_largest"], rel=1e-12)
    assert float(values[len(values) // 2 :].log().sum()) == pytest.approx(entry["window_log_sum"], rel=1e-10)


def test_the_distance_is_that_of_the_authors():
    for entry in GOLDEN["matrices"][:4]:
        values = spectra.eigenvalues(torch.from_numpy(matrix(entry)))
        fits = [1 + 1 / (values[start:] / values[start]).log().mean() for start in range(len(values) - 1)]
        start = int((torch.stack(fits) - entry["xmin_peak"]).abs().argmin())
        distance = spectra.ks_distance(values, fits[start].reshape(1), torch.tensor([start]))
        assert float(distance) == pytest.approx(entry["xmin_peak_distance"], abs=1e-10)


def test_candidates_compared_in_parts_have_the_same_least_distance(monkeypatch):
    values = spectra.eigenvalues(gaussian(90, 100) * 0.1)
    together = spectra.alpha(values, fix_fingers="xmin_peak")
    monkeypatch.setattr(spectra, "_DISTANCES", 7 * 90)
    assert spectra.alpha(values, fix_fingers="xmin_peak") == together


# Types, batches and parts.


def test_half_types_are_measured_as_their_values():
    weight = gaussian(96, 160).float()
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        values = spectra.eigenvalues(weight.to(kind))
        assert values.dtype == torch.float64
        assert torch.equal(values, spectra.eigenvalues(weight.to(kind).double()))


def test_the_result_has_the_type_solved_in():
    weight = torch.nn.Parameter(gaussian(96, 160).float())
    exact, single = spectra.eigenvalues(weight), spectra.eigenvalues(weight, dtype=torch.float32)
    assert single.dtype == torch.float32 and not single.requires_grad
    assert spectra.alpha(single) == pytest.approx(spectra.alpha(exact), rel=1e-5)
    low_rank = gaussian(96, 8) @ gaussian(8, 96, 1)
    assert (spectra.eigenvalues(low_rank, dtype=torch.float32) >= 0).all()


@pytest.mark.parametrize(
    ("capability", "hip", "kind"),
    [
        ((9, 0), None, torch.float64),
        ((8, 0), None, torch.float64),
        ((8, 9), None, torch.float32),
        ((12, 0), None, torch.float32),
        ((9, 4), "6.2", torch.float64),
        ((11, 0), "6.2", torch.float32),
    ],
)
def test_the_capability_of_a_gpu_decides_the_type(monkeypatch, capability, hip, kind):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert spectra.solver_type("cuda:0") == kind
    assert spectra.solver_type("cpu") == torch.float64


def test_experts_of_a_batch_are_measured_as_single_ones(monkeypatch):
    experts = torch.stack([gaussian(64, 160, seed) for seed in range(5)])
    monkeypatch.setattr(spectra, "_ELEMENTS", 2 * 64 * 160)  # two experts at a time
    values = spectra.eigenvalues(experts)
    assert values.shape == (5, 64)
    for position in (2, 1.5):
        for fingers in ("xmin_mid", "xmin_peak"):
            alphas = spectra.alpha(values, position, fix_fingers=fingers)
            single = [spectra.alpha(spectra.eigenvalues(expert), position, fix_fingers=fingers) for expert in experts]
            assert alphas.dtype == torch.float64
            assert alphas.tolist() == pytest.approx(single, rel=1e-12)
    pooled = spectra.window_eigenvalues(experts, 32, 3)
    assert torch.equal(pooled[3], spectra.window_eigenvalues(experts[3], 32, 3))


def test_filtered_rows_of_a_batch_have_their_own_lengths():
    rows = torch.tensor([[1e-9, 1e-6, 1.0, 2.0, 4.0, 9.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1e-9] * 5 + [1e-6]])
    alphas = spectra.alpha(rows, filter_zeros=True)
    exact = [
        spectra.alpha(rows[0, 2:]),
        spectra.alpha(rows[1]),
        spectra.alpha(rows[2]),
    ]  # the last: all would be left out
    assert alphas.tolist() == pytest.approx(exact, rel=1e-12)
    for fingers in ("xmin_mid", "xmin_peak"):
        filtered = spectra.alpha(rows[0], fix_fingers=fingers, filter_zeros=True)
        assert filtered == pytest.approx(spectra.alpha(rows[0, 2:], fix_fingers=fingers), rel=1e-12)


def test_windows_are_views_at_regular_steps():
    weight = torch.arange(20.0 * 30).reshape(20, 30)
    view = spectra.windows(weight, 8, 4)
    assert view.shape == (4, 4, 8, 8)
    assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert torch.equal(view[2, 3], weight[8:16, 21:29])
    assert spectra.windows(weight, 100).shape == (1, 9, 20, 20)  # at most the short side
    assert spectra.windows(weight, 8, 1).shape == (1, 1, 8, 8)
    for size, count in ((0, 3), (8, 0)):
        with pytest.raises(SpecError, match="windows"):
            spectra.windows(weight, size, count)
    with pytest.raises(SpecError, match="not empty"):
        spectra.windows(weight[:0])


def test_convolutions_have_a_matrix_for_each_place_of_the_kernel():
    conv = torch.nn.Conv2d(6, 10, 3).weight
    matrices = spectra.conv_matrices(conv)
    assert matrices.shape == (9, 10, 6)
    assert torch.equal(matrices[5], conv.detach()[:, :, 1, 2] * math.sqrt(0.5))
    assert spectra.conv_matrices(conv.bfloat16()).dtype == torch.float32
    assert spectra.pooled_eigenvalues(matrices).shape == (54,)
    with pytest.raises(SpecError, match="convolution"):
        spectra.conv_matrices(torch.ones(4, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_measures_what_the_cpu_measures():
    weights = [
        gaussian(300, 200),
        gaussian(96, 160).bfloat16(),
        torch.stack([gaussian(64, 90, seed) for seed in range(3)]),
    ]
    weights[2][1, 0, 0] = math.nan
    torch.use_deterministic_algorithms(True)
    try:
        for weight in weights:
            for measure in (spectra.eigenvalues, lambda weight: spectra.window_eigenvalues(weight, 32, 4)):
                values, exact = measure(weight.cuda()), measure(weight)
                assert values.is_cuda and values.dtype == spectra.solver_type("cuda")
                for options in ({}, {"filter_zeros": True}, {"fix_fingers": "xmin_peak"}):
                    alphas, exact_alphas = (torch.as_tensor(spectra.alpha(each, **options)) for each in (values, exact))
                    assert alphas.tolist() == pytest.approx(exact_alphas.tolist(), rel=1e-5, nan_ok=True)
    finally:
        torch.use_deterministic_algorithms(False)


# What cannot be measured.


def nan(values: object) -> bool:
    return isinstance(values, float) and math.isnan(values)


@pytest.mark.parametrize("fingers", ["xmin_mid", "xmin_peak"])
def test_what_cannot_be_measured_is_nan(fingers):
    cases = {
        "zeros": torch.zeros(60, 70),
        "half of the rows are zero": torch.cat([gaussian(20, 90), torch.zeros(70, 90)]),
        "identity": torch.eye(64),
        "orthogonal": torch.from_numpy(np.linalg.qr(gaussian(64, 64).numpy())[0]),
        "two eigenvalues": gaussian(2, 90),
        "empty": torch.ones(0, 90),
        "nan": gaussian(60, 60).index_fill(0, torch.tensor([3]), math.nan),
        "infinite": gaussian(60, 60).index_fill(0, torch.tensor([3]), math.inf),
        "overflow": gaussian(60, 60) * 1e200,
    }
    for name, weight in cases.items():
        measured = spectra.alpha(spectra.eigenvalues(weight), fix_fingers=fingers)
        if fingers == "xmin_peak" and name.startswith("half"):
            assert 1 < measured < 100, "only eigenvalues above zero are candidates"
        else:
            assert nan(measured), name


def test_zero_rows_below_the_tail_do_not_matter():
    weight = gaussian(100, 150)
    weight[:30] = 0
    values = spectra.eigenvalues(weight)
    assert (values[:30] == 0).all() and (values[30:] > 0).all()
    rest = spectra.eigenvalues(weight[30:])
    exact = 1 + 50 / float((rest[20:] / rest[20]).log().sum())
    assert spectra.alpha(values) == pytest.approx(exact, rel=1e-12)
    assert spectra.alpha(values, fix_fingers="xmin_peak") > 1


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [64, 300])
def test_a_matrix_of_low_rank_is_not_measured_against_rounding(size, kind):
    weight = gaussian(size, 10) @ gaussian(10, 2 * size, 1)
    values = spectra.eigenvalues(weight, dtype=kind)
    assert (values > 0).sum() == 10
    assert nan(spectra.alpha(values))


def test_one_broken_expert_leaves_the_others_measured(monkeypatch):
    experts = torch.stack([gaussian(60, 80, seed) for seed in range(4)])
    experts[2, 5, 5] = math.nan
    solve = torch.linalg.eigvalsh

    def sound(gram):
        assert gram.isfinite().all(), "some solvers hang or crash on these"
        return solve(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", sound)
    values = spectra.eigenvalues(experts)
    assert values.isnan().all(-1).tolist() == [False, False, True, False]
    assert torch.equal(values[3], spectra.eigenvalues(experts[3]))
    assert spectra.alpha(values).isnan().tolist() == [False, False, True, False]


def test_a_solver_that_fails_gets_each_matrix_once_more_on_the_cpu(monkeypatch):
    experts = torch.stack([gaussian(60, 80, seed) for seed in range(3)]).float()
    exact, solve, calls = spectra.eigenvalues(experts), torch.linalg.eigvalsh, []

    def failing(gram):
        calls.append((tuple(gram.shape), gram.dtype))
        if gram.ndim == 3 or len(calls) == 3:  # the batch, and its second matrix for good
            raise torch.linalg.LinAlgError("failed to converge")
        return solve(gram)

    monkeypatch.setattr(torch.linalg, "eigvalsh", failing)
    values = spectra.eigenvalues(experts, dtype=torch.float32)
    assert calls == [((3, 60, 60), torch.float32)] + 3 * [((60, 60), torch.float64)]
    assert values[1].isnan().all()
    assert torch.equal(values[::2], exact[::2].float())


def test_mixed_precision_does_not_change_the_result():
    weight = gaussian(96, 160).float()
    exact = spectra.eigenvalues(weight, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(spectra.eigenvalues(weight, dtype=torch.float32), exact)


class Wrapped(torch.Tensor):
    """As DTensors and quantised tensors are: a subclass that has its own dispatch."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("an operation of a refused tensor")


def test_weights_without_a_spectrum_are_refused():
    weight = gaussian(8, 8).float()
    cases = {
        "not a tensor": weight.numpy(),
        "meta device": weight.to("meta"),
        "Dequantise": weight.to(torch.int8),
        "codes": weight.to(torch.float8_e4m3fn),
        "no real numbers": weight.to(torch.complex64),
        "to_dense": weight.to_sparse(),
        "Leave vectors out": weight[0],
        "conv_matrices": torch.ones(4, 4, 3, 3),
        "full_tensor": torch.Tensor._make_wrapper_subclass(Wrapped, (8, 8), dtype=torch.float32),
    }
    for words, bad in cases.items():
        with pytest.raises(SpecError, match=words):
            spectra.eigenvalues(bad)
    with pytest.raises(SpecError, match="Dequantise"):
        spectra.window_eigenvalues(weight.to(torch.int8))
    with pytest.raises(SpecError, match="no solver"):
        spectra.eigenvalues(weight, dtype=torch.float16)


def test_arguments_out_of_range_are_refused():
    values = torch.arange(1.0, 60.0)
    for position in (1, 0.5, 0, -2, math.nan, math.inf):
        with pytest.raises(SpecError, match="xmin_pos"):
            spectra.alpha(values, position)
        with pytest.raises(SpecError, match="xmin_pos"):
            spectra.random_limit(8, 8, position)
    with pytest.raises(SpecError, match="'xmin_mid', 'xmin_peak'"):
        spectra.alpha(values, fix_fingers="median")
    with pytest.raises(SpecError, match="one spectrum"):
        spectra.alpha(values.reshape(1, 1, -1))
    with pytest.raises(SpecError, match="no matrix"):
        spectra.random_limit(0, 8)
