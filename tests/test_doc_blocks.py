"""Every block of code on every page runs, or is marked `<!-- fragment -->` and names only what exists.

Blocks run page by page, in their order, with the names of the blocks before; files of the demo are in the working
folder. A fragment needs what a test does not have (a cluster, a GPU, a bucket): it compiles, what it imports exists,
and its calls fit the signatures. Commands are compared with the command line, in blocks and in the text.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.integrations.torch_loader import DataLoader
from overlord.transforms.samples.tokenize import TextTokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md", *sorted(ROOT.glob("docs/*.md"))]
LANGUAGES = {"python", "pycon", "bash", "yaml", "csv", "jsonl", "diff", "text"}
ELSEWHERE = {
    "strategies.md": "cli/test_explain.py",
    "formats.md": "readers/test_own_readers.py",
    "coming-from.md": "test_coming_from.py",
    "tour.md": "test_doc_blocks.py",
}
"""Pages whose blocks run in other tests, or as commands."""
INSTANCES = {"service": ol.Service, "client": ol.Client, "loader": DataLoader}
"""What these names are instances of, on every page."""
TRAINERS = {"deepspeed", "hf", "lightning", "megatron", "torchtitan", "veomni"}
"""Modules that import a trainer's library, which may not be installed, or takes seconds to load."""
SHELL = {"do", "done", "kill", "sleep", "source", "test", "until", "wait"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    fragment: bool


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in re.finditer(r"^(<!-- fragment -->\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(page, text[: found.start()].count("\n") + 1, found[2], found[3], bool(found[1]))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of(*languages: str) -> Any:
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=[f"{b.page.name}:{b.line}" for b in chosen])


def test_every_block_says_its_language():
    assert [f"{b.page.name}:{b.line}" for b in BLOCKS if b.language not in LANGUAGES] == []
    for page in PAGES:
        assert page.read_text().count("\n```") == 2 * len([*blocks_of(page)]), (
            f"{page.name} has a fence that is not read"
        )
    code = re.compile(r"^(\$ |overlord |import |from \w+ import )", re.MULTILINE)
    assert [f"{b.page.name}:{b.line}" for b in BLOCKS if b.language == "text" and code.search(b.text)] == []
    assert all(block.language == "python" for block in BLOCKS if block.fragment)
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / "tests" / test).read_text()


# ---- Python


def page_job(*names: str, level: str = "sample") -> ol.Job:
    sources = [ol.Source(name, "web/") for name in names]
    batch = ol.Batch(2048, global_samples=8)
    return ol.Job(sources, ol.Mixture(level=level), tokenizer="tokenizer.json", batch=batch, seed=3)


@contextlib.contextmanager
def names_of(page: str) -> Iterator[dict[str, Any]]:
    """What the blocks of a page take for given."""
    names: dict[str, Any] = {"ol": ol, "tree": ol.ClientPlaceTree(dp=2), "job": page_job("web", "code")}
    with contextlib.ExitStack() as opened:
        if page == "stores.md":
            with ol.launch(page_job("web"), mesh="dp=4", runtime="inline", store="runs/first") as service:
                clients = [service.client(rank) for rank in range(4)]
                assert all(next(client).index == step for step in range(3) for client in clients)
        if page in ("mixtures.md", "elasticity.md"):
            learns = page == "mixtures.md"
            job = page_job("web", "code", "math" if learns else "web-2019", level="token" if learns else "sample")
            names["service"] = opened.enter_context(ol.launch(job, mesh="dp=2", runtime="inline"))
            names["client"] = names["service"].client(0)
            names["step"] = next(names["client"])
        yield names


RUN = sorted({b.page for b in BLOCKS if b.language == "python" and not b.fragment and b.page.name not in ELSEWHERE})


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name == "faults.md" else [], id=page.name) for page in RUN],
)
def test_python_runs(page, demo_files, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(demo_files.folder, tmp_path / "files"))
    shutil.copytree(folder / "web", folder / "math")
    whole = next(block for block in BLOCKS if block.page.name == "job-files.md" and block.language == "yaml")
    (folder / "job.yaml").write_text(whole.text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))  # of the cache
    with names_of(page.name) as names:
        for block in blocks_of(page):
            if block.language == "python" and not block.fragment:
                text = block.text.replace("1234", "2")  # the step that is looked at again
                exec(compile(text, f"{page.name}:{block.line}", "exec"), names)  # noqa: S102 - our own page


@pytest.mark.parametrize("page", [page for page in PAGES if "```pycon" in page.read_text()], ids=lambda page: page.name)
def test_sessions_give_what_they_show(page):
    text = "\n".join(block.text for block in blocks_of(page) if block.language == "pycon")
    told: list[str] = []
    outcome = doctest.DocTestRunner().run(
        doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0), out=told.append
    )
    assert outcome.attempted > 5
    assert outcome.failed == 0, "".join(told)


def found_in(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return what an expression names; None if that is the reader's own, or is known only when it runs."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    owner = found_in(node.value, names) if isinstance(node, ast.Attribute) else None
    if owner is None or not isinstance(node, ast.Attribute):
        return None
    if owner in INSTANCES.values() and f"self.{node.attr} = " in inspect.getsource(owner):
        return None  # an attribute that instances have
    assert hasattr(owner, node.attr), f"{ast.unparse(node)} does not exist"
    found = getattr(owner, node.attr)
    return found if callable(found) or inspect.ismodule(found) else None


def learn_imports(node: ast.Import | ast.ImportFrom, names: dict[str, Any]) -> None:
    if isinstance(node, ast.Import):
        names |= {alias.asname or alias.name: ol for alias in node.names if alias.name == "overlord"}
    elif (module := node.module or "").startswith("overlord"):
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin, f"there is no {module}"
        for alias in node.names:
            assert re.search(rf"\b{alias.name}\b", Path(spec.origin).read_text()), f"{module} has no {alias.name}"
            if module.rpartition(".")[2] not in TRAINERS:
                names[alias.name] = getattr(importlib.import_module(module), alias.name)


def check_call(node: ast.Call, names: dict[str, Any]) -> None:
    function = found_in(node.func, names)
    if function is None or any(isinstance(value, ast.Starred) for value in node.args):
        return
    method = isinstance(node.func, ast.Attribute) and found_in(node.func.value, names) in INSTANCES.values()
    try:
        inspect.signature(function).bind_partial(
            *[None] * (len(node.args) + method), **{word.arg: None for word in node.keywords if word.arg}
        )
    except TypeError as error:
        raise AssertionError(f"{ast.unparse(node)}: {error}") from error


@of("python", "diff")
def test_what_python_names_exists(block):
    text = block.text
    if block.language == "diff":  # what is left of a script after its change
        text = "\n".join(line[1:] for line in text.splitlines() if not line.startswith("-"))
    tree, names = ast.parse(text), {"ol": ol, **INSTANCES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            learn_imports(node, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found_in(node, names)
        if isinstance(node, ast.Call):
            check_call(node, names)


@pytest.mark.parametrize(
    "text",
    [
        "ol.lanch(job)",
        "ol.launch(job, mash='dp=2')",
        "ol.costs.nothing()",
        "service.reshard(1, 2, 3, 4)",
        "loader.nothing()",
        "from overlord.integrations.hf import Nothing",
        "from overlord.nothing import DataLoader",
    ],
)
def test_wrong_python_is_found(text):
    with pytest.raises((AssertionError, ModuleNotFoundError)):
        test_what_python_names_exists(Block(ROOT, 0, "python", text, True))


# ---- commands


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every command of a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\||[;&|]", line.split(" #")[0] if not line.startswith("#") else ""):
            if words := shlex.split(part):
                yield words


def check_command(words: list[str], written: set[str]) -> None:
    """Check that a command exists, with its options and files; `written` are files of the page."""
    name = words[0].removeprefix(".venv/bin/")
    if name == "overlord":
        outcome = CliRunner().invoke(app, [*words[1:], "--help"])  # options are parsed before the help is shown
        assert outcome.exit_code == 0, f"{shlex.join(words)}: {outcome.output}"
    elif name == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif name == "pip":
        extras = re.findall(r"\[([\w,-]+)\]", shlex.join(words))
        known = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        assert words[1] == "install" and {one for extra in extras for one in extra.split(",")} <= {*known}, words
        assert not any(word.startswith("overlord") for word in words), "no index has it: pip install -e '.[extra]'"
    elif name in ("python", "torchrun"):
        module = words[2].replace(".", "/") + ".py" if words[1] == "-m" else ""
        script = module or next(word for word in words if word.endswith(".py"))
        assert script in written or (ROOT / script).is_file(), words
        source = "" if script in written else (ROOT / script).read_text()
        for option in re.findall(r" (--[\w-]+)", shlex.join(words).split(words[2] if module else script)[1]):
            assert f'"{option}"' in source, f"{script} has no {option}"
    else:
        assert name in SHELL, f"{shlex.join(words)}: a command that no test knows"


@of("bash")
def test_commands_exist(block):
    written = {
        name for one in blocks_of(block.page) for name in re.findall(r"\A# ([\w-]+\.\w+)$", one.text, re.MULTILINE)
    }
    for words in commands_in(block.text):
        check_command(words, written)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in SPANS.findall(prose.replace("\n", " ")):
        check_span(span)


SPANS = re.compile(r"(?<!`)`((?:overlord|make|pip) [^`]+)`")
"""Commands inside of a sentence."""


def check_span(span: str) -> None:
    """Check a command of a sentence, which may leave out what it is given: its name and options exist."""
    words = span.split()
    if words[0] != "overlord":
        check_command(shlex.split(span), set())
        return
    group = words[1] in ("sources", "steps", "import") and len(words) > 2
    shown = help_of(*words[1 : 2 + group])
    assert [word for word in re.findall(r"(?<= )--?[a-z][\w-]*", span) if word not in shown] == [], span


FOLDERS = sorted({path.parent for path in (ROOT / "src" / "overlord").rglob("*.py")})


def texts_of(source: Path) -> Iterator[str]:
    """The texts in a file of the package; `VALUE` stands for what a text is filled with."""
    parts = set[int]()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(one) for one in ast.walk(node)}
            yield "".join(one.value if isinstance(one, ast.Constant) else "VALUE" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_commands_in_messages_exist(folder):
    for source in sorted(folder.glob("*.py")):
        for text in texts_of(source):
            assert "pip install" not in text or source.name in INSTALLS, f"{source}: use pip_install: {text}"
            for span in SPANS.findall(re.sub(r"\s+", " ", text)):
                if "VALUE" not in span.split()[1]:
                    check_span(span)


INSTALLS = {"errors.py"}
"""Where the command that installs an extra is made, for this install."""


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "'overlord-data[media]'"),
        ({"url": "file:///home/me/a%20clone", "dir_info": {"editable": True}}, "-e '/home/me/a clone[media]'"),
        ({"url": "file:///home/me/clone", "dir_info": {}}, "'/home/me/clone[media]'"),
        ({"url": "file:///w/o.whl", "archive_info": {}}, "'overlord-data[media] @ file:///w/o.whl'"),
        (
            {"url": "https://h/o.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "'overlord-data[media] @ git+https://h/o.git@1f'",
        ),
        ("not installed", f"-e '{ROOT}[media]'"),
    ],
)
def test_a_remedy_names_this_install(tmp_path, origin, expected):
    if origin != "not installed":
        record = tmp_path / "overlord_data-0.1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: overlord-data\nVersion: 0.1.0\n")
        if origin is not None:
            (record / "direct_url.json").write_text(json.dumps(origin))
    look = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT / 'src')]}\n"
    look += "from overlord.errors import pip_install; print(pip_install('media'))"
    said = subprocess.check_output([sys.executable, "-S", "-c", look], text=True, timeout=60).strip()
    command, _, what = said.partition(" install ")
    assert what == expected
    assert command in ("pip", f"{sys.executable} -m pip")


@functools.cache
def help_of(*command: str) -> str:
    outcome = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300"})
    assert outcome.exit_code == 0, f"there is no command {shlex.join(command)}"
    return outcome.output


@pytest.mark.parametrize(
    "text",
    [
        "overlord rum job.yaml",
        "overlord run job.yaml --mash dp=2",
        "make nothing",
        "pip install 'x[nothing]'",
        "pip install 'overlord-data[media]'",
        "rm -r x",
    ],
)
def test_wrong_commands_are_found(text):
    with pytest.raises(AssertionError):
        check_command(shlex.split(text), set())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour_of_tour_md_runs(demo_files, tmp_path):
    """Its files are written, its commands run in one folder, in the order of the page."""
    shutil.copytree(demo_files.folder, tmp_path / "overlord-demo")
    (job,) = (block for block in BLOCKS if block.page.name == "job-files.md" and "$schema" in block.text)
    (tmp_path / "overlord-demo" / "job.yaml").write_text(job.text)
    (tmp_path / "overlord").write_text(f"#!{sys.executable}\nfrom overlord.__main__ import main\nmain()\n")
    (tmp_path / "overlord").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = 0
    for block in blocks_of(ROOT / "docs" / "tour.md"):
        if named := re.match(r"# ([\w-]+\.\w+)\n", block.text):
            (tmp_path / named[1]).write_text(block.text)
        elif not re.match("make demo|pip install", block.text):  # they install; the demo has its own tests
            environment = os.environ | {"PATH": path, "OVERLORD_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
            done = subprocess.run(
                ["bash", "-euc", block.text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{block.text}{done.stdout}{done.stderr}"
            ran += 1
    assert ran == 5 and (tmp_path / "checkpoint.pt").is_file()


def test_the_tokenizer_of_the_tour_loses_no_character(tmp_path):
    for block in blocks_of(ROOT / "docs" / "tour.md"):
        if re.match(r"# (write_articles|train_tokenizer)\.py\n", block.text):
            subprocess.run([sys.executable, "-c", block.text], cwd=tmp_path, check=True, timeout=60)
    assert TextTokenizer(str(tmp_path / "tokenizer.json")).lost_characters(["<Z\u00fcrich> \u6f22\U0001f642"]) == [""]


# ---- what pages quote


def test_messages_in_what_to_do_when_are_those_of_the_code():
    """`..` stands for one value, or for some of the text between two parts."""
    text = (ROOT / "docs" / "operations.md").read_text()
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that follow each other are one
    cells = [cell for line in text.splitlines() if line.startswith("| ") for cell in line.split(" | ")[:1]]
    quoted = [span for cell in cells for span in re.findall(r"`([^`]{25,})`", cell)]
    assert len(quoted) > 30
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("..") if part.strip()]
        assert re.search(r"[^\n]{0,300}?".join(parts), code), f"no part of the code says: {message}"


def test_the_readme_shows_the_page_first_and_the_figures_of_the_report():
    readme, report = (ROOT / "README.md").read_text(), (ROOT / "benchmarks" / "REPORT.md").read_text()
    assert "](docs/dashboard.png)" in "\n".join(readme.splitlines()[:16])
    assert len(readme.splitlines()) < 130
    measured = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (.*?) \|", report, re.MULTILINE))
    figures = re.findall(r"^\| \[(\w+)\]\(benchmarks/REPORT\.md#(\w+)\) \| (.*?) \|", readme, re.MULTILINE)
    assert len(figures) == 5
    assert [(name, anchor, value) for name, anchor, value in figures if (name, value) != (anchor, measured[name])] == []
