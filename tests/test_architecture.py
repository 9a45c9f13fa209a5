"""The house: floors, purity, names, the face, what stands in the root, and that figure 7 can be found in the tree."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import overlord

MOST_FILES = 16  # one file for each trainer
ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "overlord"
FILES = sorted(SRC.rglob("*.py"))
CRAFTS = ("planning", "scaling", "readers", "transforms", "stores")
FLOORS: dict[str, float] = {
    "errors": 0,
    "version": 0,
    "core": 1,
    "storage": 1,
    "job": 2,
    **dict.fromkeys(CRAFTS, 3),
    "launch_spec": 3.4,
    "job_files": 3.5,
    "roles": 4,
    "runtimes": 5,
    "session": 6,
    "companions": 7,
    "testing": 7,
    "reports": 7.5,
    "cli": 8,
    "integrations": 8,
    "dashboard": 7.8,
    "__main__": 9,
}
IMPURE = {
    "threading",
    "time",
    "asyncio",
    "random",
    "pyarrow",
    "socket",
    "subprocess",
    "os",
    "io",
    "pathlib",
    "tempfile",
}
ENGINE = {"threading", "time", "asyncio", "socket", "subprocess", "multiprocessing", "ray"}


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def floor_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down_the_floors(path):
    here = floor_of(path)
    if here == "__init__":
        return
    for module in imports_of(path):
        if not module.startswith("overlord"):
            continue
        there = module.split(".")[1] if "." in module else "session"
        if there == here:
            continue
        assert FLOORS[there] < FLOORS[here], f"{here} must not import {there} ({module})"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_pure_floors_are_pure_and_engines_stay_in_runtimes(path):
    tops = {module.split(".")[0] for module in imports_of(path)}
    here = floor_of(path)
    if here in ("core", "planning", "scaling"):
        allowed = {"os"} if "spec" in path.name else set()  # os.PathLike, to take paths as text
        assert not tops & IMPURE - allowed
    if here in ("core", "planning", "scaling", "readers", "transforms", "stores", "roles"):
        assert "ray" not in tops
    assert "ray" not in tops or path.name == "ray_cluster.py", "one file knows Ray"
    if here == "roles":
        assert not tops & ENGINE
    if here not in ("integrations", "companions"):
        assert "torch" not in tops


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_modules_say_what_they_hold(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a module docstring says what lives here"
    assert path.stem not in ("utils", "common", "helpers", "misc", "base")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name != "OverlordTrainerMixin":  # the word of its users
            assert not re.search(r"(Manager|Helper|Impl|Mixin)$|^(Base|Default)[A-Z]", node.name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "environ" or floor_of(path) == "cli"


def test_the_root_holds_only_what_belongs_there():
    """A store or a cache that a test writes relative to the working folder would be committed with the next change."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--directory"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = {line.split("/")[0] for line in listed.stdout.splitlines() if (ROOT / line).exists()}
    known = {".ci", ".git-blame-ignore-revs", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"}
    known |= {"README.md", "benchmarks", "deploy", "docs", "examples", "mkdocs.yml", "pyproject.toml", "src", "tests"}
    known |= {"shared"}
    assert found <= known


def test_nothing_read_is_evaluated_or_unpickled():
    for path in FILES:
        text = path.read_text()
        assert "import pickle" not in text, path
        assert not re.search(r"(?<![\w.])eval\(|(?<![\w.])exec\(|yaml\.load\(", text), path
        if "cloudpickle.loads" in text:
            launched = (
                "service_options.py",
                "process_workers.py",
                "reader_processes.py",
                "tokenizer_trial.py",
            )
            assert path.name in launched, "code goes from the launcher to its own roles"


def test_the_papers_words_are_files():
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawing = text.split("```")[1]
    paths = re.findall(r"`src/overlord/([\w/]+\.py)`", text) + re.findall(r"(?<![\w/])(\w+/[\w/]*(?:\.py)?)", drawing)
    assert len(paths) > 25
    for path in paths:
        assert (SRC / path).exists(), path
    for room in re.findall(r"`(\w+/)`", text.split("## Where roles run")[1].split("\n- ")[0]):
        assert (SRC / room).is_dir() or (SRC / "runtimes" / room).is_dir(), room
    for word in ("Source Loader", "Data Constructor", "Planner", "ClientPlaceTree", "DGraph", "AutoScaler", "shadow"):
        assert word in text
    assert len(text.splitlines()) <= 110, "two screens"


def test_the_glossary_has_the_papers_words_and_names_that_exist():
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    words = {word for paper, ours, _ in rows for word in f"{paper}, {ours}".lower().replace("`", "").split(", ")}
    assert {"source loader", "data constructor", "planner", "client place tree", "dgraph", "loading plan"} <= words
    code = "\n".join(path.read_text() for path in FILES)
    for name in re.findall(r"`([A-Z]\w+)`", " ".join(ours for _, ours, _ in rows)):
        assert re.search(rf"^class {name}\b", code, re.MULTILINE), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_processes_and_rows_are_no_persons(path):
    person = re.compile(r"\b(who|whoever|whom|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
    found = [number for number, line in enumerate(path.read_text().splitlines(), 1) if person.search(line)]
    assert not found, f"lines {found}: name the process, caller, row or file"


def test_the_five_steps_of_the_workflow_are_marked():
    marks = {n: [p for p in FILES if f"# ({n})" in p.read_text()] for n in range(1, 6)}
    assert all(len(found) == 1 for found in marks.values()), {n: [p.name for p in f] for n, f in marks.items()}


def test_the_face():
    assert set(overlord.__all__) == {
        "Audio", "Augment", "Batch", "Budget", "Chat", "Client", "ClientPlaceTree", "ClosedError", "Custom", "DGraph",
        "HookError", "ImageChat", "ImageText", "Interleaved", "Job", "Join", "Layout", "Learn", "LoadingPlan",
        "Mixture", "OverlordError", "PlanError", "ReaderError", "ReportMissing", "SampleId", "Scaling", "Service",
        "ServiceLost", "Source", "SourceError", "SpecError", "StateError", "StoreError", "Text", "ToleranceError",
        "Video", "balance", "connect", "constructor_do_plan", "costs", "hooks", "launch", "load_job", "loader_do_plan",
        "plan_raw", "replay", "strategies", "summary_buffer",
    }  # fmt: skip
    assert all(getattr(overlord, name).__doc__ for name in overlord.__all__)


def test_import_has_no_side_effect_and_needs_neither_torch_nor_ray():
    code = (
        "import sys, threading, overlord; "
        "print(threading.active_count(), sorted({'torch', 'ray', 'typer', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=1) == ["1", "[]\n"]


def test_a_trainer_that_attaches_loads_no_library_of_the_service():
    heavy = "{'pyarrow', 'numba', 'tokenizers', 'PIL', 'jinja2', 'pydantic', 'yaml', 'cloudpickle', 'torch'}"
    code = f"import sys, overlord; overlord.connect; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_launcher_loads_no_compiler():
    """The service compiles and loads kernels; numba would take its launcher a third of a second and 30 MB."""
    code = "import sys, overlord; overlord.launch; print(sorted({'numba', 'pyarrow.compute'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    importing = [
        name_of(path) for path in FILES if re.search(r"^(import|from) numba\b", path.read_text(), re.MULTILINE)
    ]
    assert importing == [], "a kernel is marked with overlord.core.kernels.kernel"


def test_reports_are_looked_up_in_one_place():
    """`to_svg` and `visualize` are methods below the reports; both find their drawing by name in one function."""
    below = [path for path in FILES if FLOORS.get(floor_of(path), 9) < FLOORS["reports"]]
    assert [name_of(path) for path in below if "overlord.reports" in path.read_text()] == ["core/place_tree.py"]
    code = (
        "import sys, overlord.planning.dgraph as d, overlord.core.place_tree as p; "
        "loaded = {'overlord.reports', 'jinja2'} & set(sys.modules); "
        "print(sorted(loaded), p.ClientPlaceTree(dp=2).to_svg()[:4])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] <svg\n"


def test_the_lazy_face_is_complete():
    assert set(overlord.__all__) == set(overlord._HOME_OF)
    assert set(overlord.__all__) <= set(dir(overlord))
    modules = {name for name in overlord.__all__ if inspect.ismodule(getattr(overlord, name))}
    assert modules == {"costs", "hooks", "strategies"}, "a function that is called as its file is a function here"
    assert overlord.balance([5, 4, 3, 2], 2).tolist() == [0, 1, 1, 0]
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        overlord.lunch


IMAGES = "patch merge temporal size resize min_pixels max_pixels image_token before after augment exif_transpose "
IMAGES += "jpeg_scaling extra_formats folder"


def test_job_fields_grow_deliberately():
    fields = {
        "Job": "sources mixture tokenizer batch seed overlength lag max_steps drop_last",
        "Source": "name path sample weight lengths shuffle_bytes max_row_bytes order_by join tolerance format config "
        "split storage_options",
        "Join": "path columns by key missing format config split storage_options",
        "Batch": "context_length global_tokens global_samples microbatch_tokens microbatches",
        "Text": "kind column tokenized special_tokens bos eos",
        "Chat": "kind messages template loss tools process deadline",
        "ImageChat": f"kind messages template loss tools process deadline images marker {IMAGES}",
        "ImageText": f"kind image text width height {IMAGES}",
        "Interleaved": f"kind images text marker parts special_tokens {IMAGES}",
        "Augment": "flip crop ratio brightness contrast",
        "Audio": "kind audio text sample_rate mels seconds frames_per_token audio_token before after",
        "Video": "kind video text fps frames min_frames max_frames patch merge temporal min_pixels max_pixels "
        "max_tokens video_token before after",
        "Custom": "kind fn columns name code_digest process deadline",
        "Layout": "keys rows slicing sequence_parallel block positions tokens_per_second count_time pixels mean std "
        "dummy_image mtp",
    }
    for name, expected in fields.items():
        assert set(getattr(overlord, name).model_fields) == set(expected.split())


def modules() -> dict[str, Path]:
    """All modules of the package by their names."""
    return {
        ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }


def test_no_folder_is_crowded():
    """A stranger finds a room by its folder; a folder of very many files is a list, not a room."""
    for folder in {path.parent for path in FILES}:
        inside = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(inside) <= MOST_FILES, f"{folder.relative_to(SRC)}: {len(inside)} files"


def test_names_of_modules_are_unique():
    """One word, one meaning: a traceback and an editor's search show the base name only."""
    names = Counter(path.stem for path in FILES if path.stem != "__init__")
    assert not [name for name, count in names.items() if count > 1]


def test_no_circle_of_imports():
    """Imports for types and imports inside functions count: modules that need each other are one module."""
    known, graph = modules(), {}
    for name, path in known.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= (inner & known.keys()) or {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = (found & known.keys()) - {name, "overlord"}
    del graph["overlord"]  # the lazy face names every home
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_a_trainer_that_attaches_loads_few_modules():
    code = "import sys, overlord.runtimes.client_feed; print(sum(m.startswith('overlord.') for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 25
