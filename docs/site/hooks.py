"""Hooks of mkdocs: pages of the site that are made from other files, and links between the site and the repository.

The README is the site's first page. Files outside `docs/` that pages link to are in the site under the path that they
have in the repository, so a link is checked by mkdocs whether it is followed there or on a forge.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

import overlord

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s#]+)")
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md", "benchmarks/REPORT.md"]
FILES = ["LICENSE", "deploy/*.*", "benchmarks/plots/*.svg", "examples/*.py"]

API = {
    "Jobs": "Job Source Join Batch Mixture Learn Layout load_job",
    "Samples": "Text Chat ImageText ImageChat Interleaved Augment Audio Video Custom",
    "Services": "launch connect replay Service Client Budget Scaling",
    "Meshes and plans": "ClientPlaceTree DGraph LoadingPlan SampleId balance plan_raw summary_buffer loader_do_plan "
    "constructor_do_plan",
    "Errors": "OverlordError SpecError SourceError ReaderError ToleranceError PlanError HookError StateError "
    "StoreError ReportMissing ServiceLost ClosedError",
}
MODULES = ["strategies", "costs", "hooks"]
INTEGRATIONS = {
    "torch": "torch_loader.DataLoader torch_losses.SourceLosses",
    "Long context": "torch_hdp.HybridParallel ring_models.register_hf ring_models.check_hf torch_ring.ring_attention",
    "Hugging Face": "hf.OverlordTrainer hf.OverlordTrainerMixin",
    "Lightning": "lightning.OverlordDataModule",
    "Megatron": "megatron.dataset_provider megatron.data_iterator megatron.packed_seq_params",
    "torchtitan": "torchtitan.OverlordDataLoader",
    "DeepSpeed": "deepspeed.train_step",
    "VeOmni": "veomni.register",
}


class Examples(griffe.Extension):
    """Reads a docstring's `Example:` as the section that griffe knows as `Examples:`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made, and the files outside `docs/` that pages link to."""
    made = {"cli.md": commands(), **api()}
    made |= {site_path(page): (ROOT / page).read_text() for page in PAGES}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for pattern in FILES:
        for found in sorted(ROOT.glob(pattern)):
            path = found.relative_to(ROOT).as_posix()
            if path not in PAGES:
                files.append(File.generated(config, path, abs_src_path=str(found)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the places that files have in the site."""
    path = page.file.src_uri
    home = path if path.split("/")[0] in ("deploy", "benchmarks") or path in PAGES else f"docs/{path}"
    home = "README.md" if path == "index.md" else home

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(home), link[2]))
        return link[1] + posixpath.relpath(site_path(target), posixpath.dirname(path) or ".")

    return LINK.sub(moved, markdown)


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def commands() -> str:
    """Return the help of all commands as one page."""
    words = [sys.executable, "-m", "typer", "overlord.cli.main", "utils", "docs", "--name", "overlord"]
    text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    text = "# Commands\n\n" + text.replace("```console\n$ ", "```bash\n").split("\n", 1)[1]
    # typer cuts the lines of its lists of commands: each gets the whole first sentence of the command's own section.
    for command, words in re.findall(r"^##+ `overlord ([\w ]+)`\n\n(.*)$", text, re.MULTILINE):
        link = f"[`{command}`](#overlord-{command.replace(' ', '-')})"
        text = re.sub(rf"^\* `{command.split()[-1]}`: .*$", f"* {link}: {words}", text, count=1, flags=re.MULTILINE)
    return text


def api() -> dict[str, str]:
    """Return the pages that mkdocstrings fills from docstrings; every public name is on one of them."""
    listed = {name for names in API.values() for name in names.split()} | {*MODULES}
    if listed != {*overlord.__all__}:
        raise ValueError(f"docs/site/hooks.py and overlord.__all__ differ in {sorted(listed ^ {*overlord.__all__})}")
    home = {name: f"overlord.{module}" for module, names in overlord._HOMES.items() for name in names}
    return {
        "api/overlord.md": _page("overlord", API, lambda name: f"{home[name]}.{name}"),
        "api/planning.md": _page("Strategies, costs, hooks", {"": " ".join(MODULES)}, lambda name: home[name]),
        "api/integrations.md": _page("Trainers", INTEGRATIONS, lambda name: f"overlord.integrations.{name}"),
        "api/testing.md": _page("Test tools", {"": "testing"}, lambda name: f"overlord.{name}"),
    }


def _page(title: str, groups: dict[str, str], path: Any) -> str:
    lines = [f"# {title}"]
    for group, names in groups.items():
        lines += [f"## {group}"] if group else []
        lines += [f"::: {path(name)}" for name in names.split()]
    return "\n\n".join(lines) + "\n"
