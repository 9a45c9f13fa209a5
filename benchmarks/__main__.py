"""Runs every benchmark, each in a process of its own, and writes REPORT.md and plots: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import machine
from benchmarks.plots import Bar, draw_bars, draw_steps

HERE = Path(__file__).parent
_LONG = ("benchmark", "machine", "rows", "real_rows", "real_workers", "computing_rows", "computing_workers")
"""Not shown in a report's table."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A figure that is held against a bar."""

    figure: str
    bar: str
    at_least: bool
    unit: str

    def reached(self, figures: dict[str, Any]) -> bool:
        """Tell whether the bar is reached."""
        value, bar = figures[self.figure], figures[self.bar]
        return value >= bar if self.at_least else value <= bar

    def words(self, figures: dict[str, Any]) -> str:
        """Return the figure and its bar in words."""
        limit = f"{'at least' if self.at_least else 'at most'} {figures[self.bar]:g}{self.unit}"
        return f"{self.figure} {figures[self.figure]:.3g}{self.unit}, {limit}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this package, and how its figures are shown."""

    name: str
    what: str
    against: str
    figure: str
    """The figure that is held against its bar."""
    bar: str
    """The figure that is the bar."""
    at_least: bool
    """Whether the figure must be at least or at most the bar."""
    unit: str
    plot_title: str
    plot_unit: str
    plotted: tuple[tuple[str, str, str], ...]
    """Of each bar in the plot: its name, its figure, and the figure that holds its rounds."""
    quick: tuple[str, ...]
    """Arguments for a run that only shows that the benchmark works."""
    log: bool = False
    limit_of: str | None = None
    """The figure that the bar is a share of in the plot; none where the bar is in the plot's unit."""
    needs: str = ""
    """What it needs that not every machine has: "cuda", or a module; it is left out where that is missing."""
    steps: str = ""
    """Title of a second plot: the figure `rows`, step by step; none where it is empty."""
    more_steps: tuple[tuple[str, str, str], ...] = ()
    """Of each further plot of that kind: its title, its unit, and the figure that it shows."""
    also: tuple[Bound, ...] = ()
    """Further figures with bars: the verdict is that of all."""

    @property
    def missing(self) -> str:
        """What it needs and this machine does not have; empty where it can run."""
        if self.needs == "cuda":
            torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
            return "" if torch is not None and torch.cuda.is_available() else "a CUDA device"
        found = not self.needs or importlib.util.find_spec(self.needs.partition(".")[0]) is not None
        return "" if found else self.needs

    def passed(self, figures: dict[str, Any]) -> bool:
        """Tell whether all bars are reached."""
        return not self.missed(figures)

    def missed(self, figures: dict[str, Any]) -> list[Bound]:
        """Return the figures that miss their bars; those that an older run did not measure are left out."""
        main = Bound(self.figure, self.bar, self.at_least, self.unit)
        known = [one for one in self.also if one.figure in figures]
        return [one for one in (main, *known) if not one.reached(figures)]

    def plot(self, figures: dict[str, Any]) -> str:
        """Return the plot of its figures."""
        bars = [Bar(name, figures[key], figures.get(rounds, ())) for name, key, rounds in self.plotted]
        scale = figures[self.limit_of] if self.limit_of else 1.0
        words = f"{'at least' if self.at_least else 'at most'} {figures[self.bar]:g}{self.unit}"
        return draw_bars(self.plot_title, self.plot_unit, bars, (words, figures[self.bar] * scale), log=self.log)


BENCHMARKS = (
    Benchmark(
        "feed",
        what="image-text samples/s of a `local` service: read, tokenized, decoded, resized, packed, handed to a client",
        against="as many bare processes with the same decoder, sizes and resize, their bytes in memory already",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Image-text samples per second, two workers",
        plot_unit="samples/s; line across the end: from the slowest to the fastest round",
        plotted=(
            ("overlord, the whole way", "overlord_samples_per_s", "overlord_rounds"),
            ("bare decoding processes", "bare_samples_per_s", "bare_rounds"),
        ),
        quick=("--seconds", "0.5", "--rounds", "1", "--workers", "2"),
        limit_of="bare_samples_per_s",
    ),
    Benchmark(
        "fastest",
        what="image-text samples/s of a `local` service on two cores, pictures of 0.1 to 2 megapixels, resized to at "
        "most 448 × 448 at their aspect ratio: read, tokenized, decoded, resized, packed, handed to a client",
        against="a loop of two threads with simplejpeg and OpenCV's bicubic resize to the same sizes, bytes in memory",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Pictures of many sizes per second, two cores",
        plot_unit="samples/s; line across the end: from the slowest to the fastest round",
        plotted=(
            ("overlord, the whole way", "overlord_samples_per_s", "overlord_rounds"),
            ("overlord, jpeg_scaling", "jpeg_scaling_samples_per_s", "jpeg_scaling_rounds"),
            ("simplejpeg and OpenCV, two threads", "loop_samples_per_s", "loop_rounds"),
        ),
        quick=("--seconds", "0.5", "--rounds", "1"),
        limit_of="loop_samples_per_s",
    ),
    Benchmark(
        "pictures",
        what="pictures as people have them (PNG, some with transparency or a palette, and JPEG; 256 to 1,600 pixels a "
        "side), two cores: work of a `local` service in a second, where a second of Pillow for a picture is 1",
        against="a loop of two threads with Pillow, bytes in memory; SPDL and Grain where `--peers` has them",
        figure="ratio_to_pillow",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Pictures as people have them, two cores",
        plot_unit="seconds of Pillow in a second; line across the end: from the slowest to the fastest round",
        plotted=(
            ("overlord, the whole way", "overlord_work_per_s", "overlord_rounds"),
            ("Pillow, two threads", "pillow_work_per_s", "pillow_rounds"),
        ),
        quick=("--seconds", "0.5", "--rounds", "1", "--distinct", "2"),
        limit_of="pillow_work_per_s",
        also=tuple(Bound(f"ratio_to_{peer}", "bar", at_least=True, unit="×") for peer in ("spdl", "grain")),
    ),
    Benchmark(
        "memory",
        what="memory (PSS) of one host: a service with 306 sources that are all drawn, its processes, four trainers",
        against="the bar; `all_mb_of_one_source` is the same with one source of text",
        figure="all_mb",
        bar="bar_mb",
        at_least=False,
        unit=" MB",
        plot_title="Memory of one host, 306 sources, four trainers",
        plot_unit="MB (PSS)",
        plotted=(
            ("all", "all_mb", ""),
            ("service", "service_mb", ""),
            ("worker and reader processes", "workers_mb", ""),
            ("four trainers", "trainers_mb", ""),
            ("all, with one source", "all_mb_of_one_source", ""),
        ),
        quick=("--sources", "12"),
    ),
    Benchmark(
        "idle",
        what="memory (PSS) of each further idle source with 1,000 row groups × 20 columns",
        against="pyarrow's footer of the same file, held open: what a loader that keeps its files open pays",
        figure="mb_each_further_source",
        bar="bar_mb",
        at_least=False,
        unit=" MB",
        plot_title="Memory of each further open source that is not drawn",
        plot_unit="MB",
        plotted=(
            ("overlord", "mb_each_further_source", ""),
            ("pyarrow's footer, held open", "mb_each_footer_held", ""),
        ),
        quick=("--sources", "20"),
        log=True,
    ),
    Benchmark(
        "shuffle",
        what="samples/s of an epoch of a Parquet file of one large row group, shuffled: the worst of text, token lists "
        "and images; it fails unless rows lose their neighbours, come once, resume anywhere and fit `shuffle_bytes`",
        against="the same rows in row groups of 256 KiB, in turns",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Samples per second of one large row group over those of small ones",
        plot_unit="× the same rows in small row groups",
        plotted=(
            ("text", "text_ratio", ""),
            ("token lists", "tokens_ratio", ""),
            ("images", "images_ratio", ""),
        ),
        quick=("--quick", "--rounds", "1"),
    ),
    Benchmark(
        "balance",
        what="largest bin; lockstep time under a token cap; of hybrid data parallelism the last rank, the lockstep "
        "time with equal counts and the slowest pipeline; each over a lower bound. The figure is the worst of them as "
        "a share of what its bar allows (1.001; 1.01; 1.02, 1.01, 1.05) or of 3, the bar of hybrid planning over plain",
        against="round robin, next fit, equal counts, argmin, dense Karmarkar-Karp, groups with barriers, blocks of no "
        "more ranks than memory needs, and data-parallel groups",
        figure="worst_share_of_what_the_bars_allow",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Lockstep time over the bound: lognormal lengths, cap 2 × the mean",
        plot_unit="× the bound",
        plotted=(
            ("overlord", "lockstep_overlord", ""),
            ("equal counts", "lockstep_equal_counts", ""),
            ("next fit in order", "lockstep_next_fit", ""),
            ("round robin", "lockstep_round_robin", ""),
        ),
        quick=("--quick",),
    ),
    Benchmark(
        "hybrid",
        what="the slowest rank of `hdp()` plans of lognormal lengths for 16, 64 and 256 ranks, over what no placement "
        "can beat, by megatron-core's own cost s² / cp; and the time to plan",
        against="megatron-core's `BalancedCPScheduler`, installed and run: its groups with a barrier behind each, as "
        "Megatron runs them, and without",
        figure="worst_over_bound",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="The slowest of 256 ranks over the bound",
        plot_unit="× the bound",
        plotted=(
            ("overlord", "ours_over_bound_256_ranks", ""),
            ("Megatron", "megatron_over_bound_256_ranks", ""),
            ("Megatron without barriers", "megatron_without_barriers_256_ranks", ""),
        ),
        quick=(),
        needs="megatron.core",
    ),
    Benchmark(
        "ring",
        what="on one GPU at 64k tokens: `ring_attention` of one rank, all blocks of a ring of four, the error of a "
        "ring, and four layers with half of their activations on the host: time and peak of memory; the figure is the "
        "worst of them as a share of what its bar allows (1.02, 1.15, 2, 1.03, 0.73), also with all of them there at "
        "128k tokens (1.05)",
        against="torch's own flash attention of the whole sequence, and the same layers without offloading",
        figure="worst_share_of_what_the_bars_allow",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Time over one call of flash attention, and over layers without offloading",
        plot_unit="×",
        plotted=(
            ("one rank", "cp1_over_flash", ""),
            ("a ring of four", "ring4_over_flash", ""),
            ("half on the host, time", "offload_0.5_time", ""),
            ("half on the host, peak", "offload_0.5_peak", ""),
        ),
        quick=("--tokens", "512", "--rounds", "1"),
        needs="cuda",
    ),
    Benchmark(
        "replay",
        what="the step of `hdp()` on 16 ranks, from every rank's microbatches of a long-tailed mix, timed one by one "
        "on one GPU (links, gradients and optimizer are left out)",
        against="the mean of its ranks, which no order of them can beat; and `vanilla` and `backbone_balance`, "
        "replayed alike",
        figure="hdp_step_over_mean",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Time of a step of four layers",
        plot_unit="ms",
        plotted=(
            ("vanilla", "vanilla_step_ms", ""),
            ("backbone_balance", "backbone_balance_step_ms", ""),
            ("hdp", "hdp_step_ms", ""),
            ("mean of the ranks", "hdp_mean_ms", ""),
        ),
        quick=("--quick", "--rounds", "1"),
        limit_of="hdp_mean_ms",
        needs="cuda",
    ),
    Benchmark(
        "planning",
        what="a step of 300,000 samples of 306 sources for 4,096 ranks × 8 microbatches: drawn, balanced, "
        "checked, digested, journaled, written as one block, and every loader's and constructor's part cut",
        against="numpy's argsort of the costs and a bare heap of the bins in numba",
        figure="ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Planning 300,000 samples, in units of argsort and a bare heap",
        plot_unit="× argsort + bare longest-first",
        plotted=(
            ("everything", "ratio", ""),
            ("draw and plan", "plan_over_baseline", ""),
            ("one block", "blob_over_baseline", ""),
            ("all parts cut", "cut_over_baseline", ""),
        ),
        quick=("--quick", "--rounds", "1"),
        also=(
            Bound("peak_mb", "peak_mb_bar", False, " MB"),
            Bound("growth_1_to_2", "growth_bar", False, "×"),
            Bound("growth_2_to_4", "growth_bar", False, "×"),
            Bound("kernels_from_cache_s", "kernels_from_cache_bar_s", False, " s"),
        ),
    ),
    Benchmark(
        "construct",
        what="payloads to the views of all ranks: joined, packed, labelled, cut, in microbatches of 32k tokens a rank; "
        "the figure is the worst of four layouts and meshes",
        against="one numpy copy of the same bytes between two warm arrays",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Packing and cutting views as a share of one memory copy",
        plot_unit="× the copy",
        plotted=(
            ("hf", "ratio_hf", ""),
            ("hf, cp=4", "ratio_hf_cp4", ""),
            ("megatron, cp=2", "ratio_megatron_cp2", ""),
            ("torchtitan", "ratio_torchtitan", ""),
            ("hf, microbatches of 8k", "ratio_hf_microbatches_of_8k", ""),
        ),
        quick=("--quick", "--rounds", "1"),
        also=(Bound("fill", "fill_bar", True, ""),),
    ),
    Benchmark(
        "placement",
        what="bytes that SourceLoaders hand to the DataConstructor with placement='auto', image-text samples",
        against="placement='loader': decoded before the hand-over; the same batches",
        figure="bytes_ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Bytes handed over for each image-text sample",
        plot_unit="KB",
        plotted=(
            ("auto", "auto_kb_per_sample", ""),
            ("loader", "loader_kb_per_sample", ""),
        ),
        quick=("--quick",),
        limit_of="loader_kb_per_sample",
    ),
    Benchmark(
        "sharing",
        what="bytes that 8 hosts of 8 ranks hold of a step of image-text samples at pp=4, cp=4 (the paper's figure 14)",
        against="a loader for each rank, which holds its samples and microbatches whole",
        figure="ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Bytes that hosts hold over those of a loader for each rank",
        plot_unit="×",
        plotted=(
            ("pp=1, cp=1", "pp1_cp1", ""),
            ("pp=1, cp=4", "pp1_cp4", ""),
            ("pp=4, cp=1", "pp4_cp1", ""),
            ("pp=4, cp=4", "pp4_cp4", ""),
        ),
        quick=(),
    ),
    Benchmark(
        "formats",
        what="tokens/s of rows of about 500 tokens from a Megatron dataset and from MDS, the slower of both; and the "
        "start of a service on a Megatron dataset of 10 million documents",
        against="the same rows as Parquet; the same start with 1,000 documents",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Tokens per second that a client takes",
        plot_unit="tokens/s",
        plotted=(
            ("Megatron .bin", "megatron_tokens_per_s", ""),
            ("MDS", "mds_tokens_per_s", ""),
            ("Parquet", "parquet_tokens_per_s", ""),
        ),
        quick=("--documents", "20000", "--seconds", "0.5", "--rounds", "1"),
        limit_of="parquet_tokens_per_s",
        also=(Bound("first_batch_s", "bar_s", False, " s"), Bound("further_mb", "bar_mb", False, " MB")),
    ),
    Benchmark(
        "fetch",
        what="a client's wait for a prefetched step of 8 MB, until it holds all arrays as views of the service's "
        "shared memory (mapped, not copied); the figure is the worse of `local` and `ray`",
        against="one copy of as many bytes out of warm shared memory, taken beside every wait; and an actor of Ray "
        "that returns 8 MB, called when needed or three ahead",
        figure="ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Wait for a prefetched step of 8 MB",
        plot_unit="× one copy out of shared memory",
        plotted=(
            ("overlord, local", "ratio_local", ""),
            ("overlord, ray", "ratio_ray", ""),
            ("Ray actor, called ahead", "ratio_actor_return_ahead", ""),
            ("Ray actor", "ratio_actor_return", ""),
        ),
        quick=("--steps", "3", "--rounds", "1"),
    ),
    Benchmark(
        "startup",
        what="memory of a `ray` service with one actor a source, 64 sources: launch to the first batch, all processes",
        against="ours, which has one loader host for all sources; the figure is how many times as much it takes",
        figure="memory_ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Memory of a service at its first batch",
        plot_unit="MB, all processes, Ray's own included",
        plotted=(
            ("16 sources", "mb_16", ""),
            ("64 sources", "mb_64", ""),
            ("306 sources", "mb_306", ""),
            ("16 sources, an actor each", "mb_16_actor_a_source", ""),
            ("64 sources, an actor each", "mb_64_actor_a_source", ""),
        ),
        quick=("--quick",),
        limit_of="mb_64",
        also=(Bound("seconds_demo", "seconds_demo_bar", False, " s"),),
    ),
    Benchmark(
        "start",
        what="launch to the first step of a `local` service: 306 Parquet sources (24 MB in row groups of 8 MB), 20 "
        "sources of one row group of 256 MB, 306 sources of 50 MB of lines in .jsonl.gz; two cores, warm page cache",
        against="the bars; the rate after the first step with 306 sources over that with 16; what was written to disk",
        figure="parquet_seconds",
        bar="parquet_seconds_bar",
        at_least=False,
        unit=" s",
        plot_title="From launch to the first step",
        plot_unit="seconds",
        plotted=(
            ("306 Parquet sources", "parquet_seconds", ""),
            ("20 row groups of 256 MB", "one_group_seconds", ""),
            ("306 .jsonl.gz sources", "gzip_seconds", ""),
        ),
        quick=("--quick",),
        also=(
            Bound("one_group_seconds", "one_group_seconds_bar", False, " s"),
            Bound("gzip_seconds", "gzip_seconds_bar", False, " s"),
            Bound("rate_ratio", "rate_bar", True, "×"),
            Bound("parquet_written_mb", "written_bar_mb", False, " MB"),
        ),
    ),
    Benchmark(
        "remote",
        what="texts and pictures from an object store that answers after 25 ms, samples or tokens a second; requests "
        "before the first step, and of later epochs with room on disk for all and for half",
        against="a service that reads the same files from the local disk, on the same cores; the figure is the lesser "
        "of the two ratios",
        figure="ratio",
        bar="bar",
        at_least=True,
        unit="×",
        plot_title="Feed from an object store",
        plot_unit="times that from the local disk",
        plotted=(
            ("texts", "ratio_texts", ""),
            ("pictures", "ratio_images", ""),
            ("texts, 1 % of the requests fail", "ratio_faults", ""),
        ),
        quick=("--quick", "--seconds", "2", "--rounds", "1"),
        also=(
            Bound("ratio_faults", "faults_bar", True, "×"),
            Bound("requests_a_source_8", "requests_bar", False, ""),
            Bound("requests_a_source_306", "requests_bar", False, ""),
            Bound("gets_all_kept", "none_bar", False, ""),
            Bound("gets_half_kept", "half_bar", False, ""),
        ),
    ),
    Benchmark(
        "checkpoints",
        what="a trainer's report made durable by the journal, and the planner's whole work on one; fsyncs of the "
        "thread that plans without feedback; bytes of the store over 2,000 steps",
        against="a bare write and fsync of the same bytes into the same folder, in turns",
        figure="ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="A report that is on disk",
        plot_unit="microseconds",
        plotted=(
            ("durable input", "durable_input_us", ""),
            ("whole report", "whole_report_us", ""),
            ("bare write and fsync", "bare_write_and_sync_us", ""),
        ),
        quick=("--quick",),
        limit_of="bare_write_and_sync_us",
    ),
    Benchmark(
        "faults",
        what="what a trainer at half the feed's capacity waits for after 5 to 10 of 64 loaders were killed, with "
        "shadows, beyond what it waits for otherwise; and the planner, every 15 steps (the paper's figure 16)",
        against="the same faults without shadows: the lost loaders come back and read again",
        figure="ratio",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Stall per fault",
        plot_unit="ms",
        plotted=(
            ("loaders, with shadows", "stall_ms_loaders_with_shadows", "rounds_with"),
            ("loaders, without", "stall_ms_loaders_without_shadows", "rounds_without"),
            ("planner, prefetch 2", "stall_ms_planner_prefetch_2", ""),
            ("planner, prefetch 4", "stall_ms_planner_prefetch_4", ""),
        ),
        quick=("--quick",),
        limit_of="stall_ms_loaders_without_shadows",
        steps="Wait for each step",
    ),
    Benchmark(
        "scaling",
        what="what a trainer waits for while a curriculum goes from text to images and back over 200 steps, with "
        "workers from `partition`, then `decide` in every interval, at no more memory; simulated with 64 CPUs, "
        "and in a real run with sources that wait; the figure is the worse of the two",
        against="the same workers for each source (two for each of 31, three for each of 12); also: all sized for the "
        "slowest source, and the partition alone",
        figure="worst_online_over_fixed_stall",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Stall over 200 steps of a second",
        plot_unit="seconds",
        plotted=(
            ("fixed, equal", "stall_s_fixed", ""),
            ("auto-partition", "stall_s_partition", ""),
            ("auto-partition + online", "stall_s_online", ""),
            ("sized for the slowest", "stall_s_slowest", ""),
            ("real: fixed, equal", "real_stall_s_fixed", ""),
            ("real: auto-partition", "real_stall_s_partition", ""),
            ("real: auto-partition + online", "real_stall_s_online", ""),
            ("real: sized for the slowest", "real_stall_s_slowest", ""),
        ),
        quick=("--quick",),
        limit_of="stall_s_fixed",
        steps="Wait for each step, on the simulated clock",
        more_steps=(
            ("Wait for each step, real run", "ms, logarithmic", "real_rows"),
            ("Workers of each kind of source, real run with online scaling", "workers, logarithmic", "real_workers"),
        ),
        also=(Bound("online_over_fixed_memory", "memory_bar", False, "×"),),
    ),
    Benchmark(
        "sizing",
        what="feed rate of 306 sources whose costs spread over three orders of magnitude, predicted by `partition` "
        "from a profile of a few samples; the figure is how far it is off, as a factor, in the worse of two mixtures",
        against="samples/s of a launch with those workers, taken from as fast as it goes",
        figure="off_by",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Predicted over measured feed rate",
        plot_unit="×",
        plotted=(
            ("all sources alike", "predicted_over_measured_uniform", ""),
            ("skewed weights", "predicted_over_measured_skewed", ""),
        ),
        quick=("--quick",),
    ),
    Benchmark(
        "simulate",
        what="steps/s of a feed as `overlord simulate` computes them from a profile: sources that wait with 2, 4, 8 "
        "and 16 workers, a trainer with a pace, and sources that compute with as many workers as cores; the figure is "
        "how far it is off, as a factor, in the worst case",
        against="a `local` launch with the same workers, taken from as fast as it goes or at that pace",
        figure="off_by",
        bar="bar",
        at_least=False,
        unit="×",
        plot_title="Simulated over measured steps a second",
        plot_unit="×",
        plotted=(
            ("waiting, fewest workers", "slowest_waiting", ""),
            ("waiting, most workers", "fastest_waiting", ""),
            ("waiting, trainer with a pace", "simulated_over_measured_paced", ""),
            ("computing, a worker a core", "computing", ""),
        ),
        quick=("--quick",),
    ),
    Benchmark(
        "chaos",
        what="steps that differ from a run without faults, while 500 random faults hit the roles of a `ray` service. "
        "The bar is on what is delivered, not on how fast: with a fault about every second the trainer waits for most "
        "of the run (`stall_s_in_all` of `seconds`)",
        against="an inline run without faults: order, plan and bytes of every rank",
        figure="wrong_steps",
        bar="bar",
        at_least=False,
        unit=" steps",
        plot_title="Stall of a run with 500 faults",
        plot_unit="seconds",
        plotted=(("waited for in all", "stall_s_in_all", ""), ("the whole run", "seconds", "")),
        quick=("--quick",),
        steps="Wait for each step",
    ),
)


def main() -> int:
    """Run all, write the report, and return 1 if one failed or missed its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all figures as one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="only see that all of them work; the figures mean nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[one.name for one in BENCHMARKS],
                        help="run these, and leave the others in the report as they are")  # fmt: skip
    parser.add_argument("--enter", nargs="*", metavar="FILE", type=Path,
                        help="run nothing: enter what benchmarks printed with --json on another machine, and judge all "
                        "figures of the report again")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, help="folder of the report (default: benchmarks, or benchmarks/data if quick)"
    )
    options = parser.parse_args()
    out: Path = options.out or (HERE / "data" if options.quick else HERE)
    found: dict[str, dict[str, Any] | None] = {}
    if options.enter is not None:
        for path in options.enter:
            try:
                figures = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
                name = next(one.name for one in BENCHMARKS if one.name == figures["benchmark"])
            except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
                parser.error(f"{path}: its last line is not what a benchmark prints with --json ({error!r})")
            found[name] = figures
        print(f"report: {write_report(out, found, options.quick, whole=False)}")
        return 0
    asked = [one for one in BENCHMARKS if options.only is None or one.name in options.only]
    for benchmark in asked:
        if benchmark.missing:
            print(f"{benchmark.name}: left out, it needs {benchmark.missing}", file=sys.stderr)
    chosen = [one for one in asked if not one.missing]
    for benchmark in chosen:
        found[benchmark.name] = run(benchmark, options.quick)
    report = write_report(out, found, options.quick, whole=options.only is None)
    done = all(figures is not None for figures in found.values())
    passed = done and all(b.passed(found[b.name] or {}) for b in chosen)
    print(f"report: {report}", file=sys.stderr)
    if options.json:
        print(json.dumps({"machine": machine(), "quick": options.quick, "passed": passed, "figures": found}))
    return 0 if passed or (done and options.quick) else 1


def run(benchmark: Benchmark, quick: bool) -> dict[str, Any] | None:
    """Run one benchmark and return its figures, or None if it failed; what it says on stderr is shown."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", "--json", *(benchmark.quick if quick else ())]
    print(f"{benchmark.name}: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    began = time.perf_counter()
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, check=False)
    if ended.returncode:
        print(f"{benchmark.name}: failed with exit code {ended.returncode}", file=sys.stderr)
        return None
    figures: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    value = f"{figures[benchmark.figure]:.3g}{benchmark.unit}"
    verdict = _verdict(benchmark, figures, quick)
    print(f"{benchmark.name}: {value} ({verdict}), {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return figures


def write_report(out: Path, found: dict[str, dict[str, Any] | None], quick: bool, *, whole: bool) -> Path:
    """Write REPORT.md and the plots beside it; return the path of the report.

    A benchmark that was not run keeps its row and its section; where it has none, it gets one that says what it needs.
    """
    plots, report = out / "plots", out / "REPORT.md"
    plots.mkdir(parents=True, exist_ok=True)
    before = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    lines = ["# Benchmarks", "", before[2] if before and not whole else _where(), ""]
    if quick:
        lines += ["**A quick run: it shows that the benchmarks work. Its figures mean nothing.**", ""]
    lines += ["Both sides of every figure were measured in one run. `make bench` measures them again.", ""]
    lines += ["| benchmark | measured | bar | verdict |", "|---|---|---|---|"]
    for benchmark in BENCHMARKS:
        old = [line for line in before if line.startswith(f"| [{benchmark.name}](")]
        why = f"not run: it needs {benchmark.missing}" if benchmark.missing else "not run"
        unknown = old or [f"| [{benchmark.name}](#{benchmark.name}) | – | – | {why} |"]
        if old and (kept := _old_figures(before, benchmark.name)) and not quick:
            unknown = [f"{old[0].rsplit(' | ', 1)[0]} | {_verdict(benchmark, kept, quick)} |"]  # by the bars of today
        lines += [_table_row(benchmark, found[benchmark.name], quick)] if benchmark.name in found else unknown
    for benchmark in BENCHMARKS:
        if benchmark.name in found:
            section = _section(benchmark, found[benchmark.name], plots)
            where = _where(found[benchmark.name] or {})
            lines += section if whole else [*section[:3], f"Run by itself: {where}", "", *section[3:]]
        else:
            lines += _old_section(before, benchmark.name) or _told(benchmark)
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return report


def _told(benchmark: Benchmark) -> list[str]:
    """Return the section of a benchmark that was never run."""
    lines = ["", f"## {benchmark.name}", "", f"Measured: {benchmark.what}.", "", f"Against: {benchmark.against}."]
    why = f" It needs {benchmark.missing}, which this machine does not have." if benchmark.missing else ""
    return [*lines, "", f"Not run yet.{why} `python -m benchmarks.{benchmark.name}` runs it."]


def _section(benchmark: Benchmark, figures: dict[str, Any] | None, plots: Path) -> list[str]:
    lines = _told(benchmark)[:-2]
    if figures is None:
        return [*lines, "", "It failed; there are no figures."]
    (plots / f"{benchmark.name}.svg").write_text(benchmark.plot(figures), encoding="utf-8")
    lines += ["", f"![{benchmark.plot_title}](plots/{benchmark.name}.svg)"]
    shown = (((benchmark.steps, "ms, logarithmic", "rows"),) if benchmark.steps else ()) + benchmark.more_steps
    for title, unit, key in shown:
        name = f"{benchmark.name}-{'steps' if key == 'rows' else key.replace('_', '-')}.svg"
        (plots / name).write_text(draw_steps(title, unit, figures[key]), encoding="utf-8")
        lines += ["", f"![{title}](plots/{name})"]
    lines += ["", "| figure | value |", "|---|---|"]
    return lines + [f"| {key} | {_value(figures[key])} |" for key in figures if key not in _LONG]


def _old_section(report: list[str], name: str) -> list[str]:
    if f"## {name}" not in report:
        return []
    begin = report.index(f"## {name}")
    end = next((at for at in range(begin + 1, len(report)) if report[at].startswith("## ")), len(report) + 1)
    return ["", *report[begin : end - 1]]


def _old_figures(report: list[str], name: str) -> dict[str, Any]:
    """Return the figures of a section, numbers as such; none where it has none."""
    rows = [line.strip("| ").split(" | ") for line in _old_section(report, name) if line.startswith("| ")]
    found: dict[str, Any] = {}
    for key, value in (row for row in rows if len(row) == 2):
        try:
            found[key] = float(value)
        except ValueError:
            found[key] = value
    found.pop("figure", None)  # the head of the table
    return found


def _where(figures: dict[str, Any] | None = None) -> str:
    """Say when and where; figures of another machine know theirs, but not its packages."""
    here = (figures or {}).get("machine", machine())
    device = f", {figures['device']}" if figures and "device" in figures else ""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("overlord-data", "pyarrow", "numpy"))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = f"{here['cpus']} cores ({here['machine']}), {here['memory_gb']} GB{device}"
    own = here == machine()
    return " · ".join([today, cores, here["system"], f"Python {here['python']}", *([versions] if own else [])])


def _table_row(benchmark: Benchmark, figures: dict[str, Any] | None, quick: bool) -> str:
    link = f"[{benchmark.name}](#{benchmark.name})"
    if figures is None:
        return f"| {link} | – | – | failed |"
    bar = f"{'at least' if benchmark.at_least else 'at most'} {figures[benchmark.bar]:g}{benchmark.unit}"
    value = f"{figures[benchmark.figure]:.3g}{benchmark.unit}"
    return f"| {link} | {value} | {bar} | {_verdict(benchmark, figures, quick)} |"


def _verdict(benchmark: Benchmark, figures: dict[str, Any], quick: bool) -> str:
    if quick:
        return "not judged"
    further = [one.words(figures) for one in benchmark.missed(figures) if one in benchmark.also]
    missed = ": ".join(["**missed**", *(["; ".join(further)] if further else [])])
    return "reached" if benchmark.passed(figures) else missed


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(_value(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
