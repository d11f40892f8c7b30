"""Packaging: installed files, import cost, pinned versions, and allowed imports between packages."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("fsdp_cp", "models", "distill")
# lazy everywhere
OPTIONAL = ("wandb", "tensorboard", "torchao", "transformer_engine", "flash_attn", "triton", "yunchang", "gradio")
# product code that is imported only if its optional package is installed
GUARDED = ("fsdp_cp/attention/kernels/triton_dual.py", "fsdp_cp/attention/kernels/triton_sparse.py")
# run by the Python of another environment
OTHER_PYTHON = "distill/evaluate/vbench_process.py"
# extras that install without a GPU, hence with pins
PINNED_EXTRAS = ("dev", "demo", "wandb", "tensorboard", "fp8", "fa4", "triton", "bench")
# modules that a package must never import, at its top or inside a function
FORBIDDEN = {
    "fsdp_cp": {"models", "distill", "train", "benchmarks", "tests", "diffusers", "transformers", "hydra"},
    "models": {"distill", "train", "benchmarks", "tests"},
    "distill": {"train", "benchmarks", "tests"},
}

pytestmark = pytest.mark.slow


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> list[Requirement]:
    """Return the base dependencies and those of the named extras."""
    lines = list(project()["dependencies"])
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[tuple[str, int]]:
    """Return (top-level module, line) of absolute imports; with at_import_time, of those that an import runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0], node.lineno
        elif at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif at_import_time and is_type_checking(node):
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []), at_import_time=True)
        else:
            yield from imports(node, at_import_time=at_import_time)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path, *, at_import_time: bool = False) -> list[tuple[str, str]]:
    """Return (top-level module, "file:line") of every absolute import in a file."""
    place = path.relative_to(ROOT)
    return [(module, f"{place}:{line}") for module, line in imports(parsed(path), at_import_time=at_import_time)]


def test_the_wheel_holds_every_module_and_nothing_else(tmp_path):
    """The test builds from a copy of the tree: a ``build/lib`` in the checkout would put deleted files in the wheel."""
    tree, out = tmp_path / "tree", tmp_path / "wheel"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, tree)
    for folder in (*PACKAGES, "tests", "benchmarks", "configs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "."]
    done = subprocess.run(pip, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for package in PACKAGES for path in sources(package)}
    assert expected <= names, sorted(expected - names)
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGES)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_every_module_imports_without_the_optional_packages():
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in sources(package)]
    names = [".".join(path.with_suffix("").parts) for path in paths if str(path) not in GUARDED]
    modules = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    # None in sys.modules makes both `import` and `find_spec` behave as if the package were not installed
    code = (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_optional_packages_are_never_imported_at_import_time():
    found = [
        f"{place} imports {module}"
        for package in PACKAGES
        for path in sources(package)
        for module, place in imports_of(path, at_import_time=True)
        if module in OPTIONAL and path not in [ROOT / guarded for guarded in GUARDED]
    ]
    assert found == []


def test_no_upward_imports():
    found = [
        f"{place} imports {module}"
        for package in PACKAGES
        for path in sources(package)
        for module, place in imports_of(path)
        if module in FORBIDDEN[package]
    ]
    assert found == []


def test_files_import_in_no_circle():
    """Imports inside functions and for types count too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sources(package)
    }
    graph = {}
    for module, path in files.items():
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
        names = [(node.module, f"{node.module}.{alias.name}") for node in nodes for alias in node.names]
        graph[module] = {name if name in files else parent for parent, name in names if parent in files} - {module}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_imported_packages_are_declared():
    base = {canonicalize_name(requirement.name) for requirement in requirements()}
    extras = {canonicalize_name(requirement.name) for requirement in requirements(*project()["optional-dependencies"])}
    distributions = importlib.metadata.packages_distributions()
    found = []
    files = [path for package in PACKAGES for path in sources(package) if path != ROOT / OTHER_PYTHON]
    for path in [*files, ROOT / "train.py"]:
        for module, place in imports_of(path):
            names = {canonicalize_name(name) for name in distributions.get(module, [module])}
            own = module in PACKAGES or module in sys.stdlib_module_names or module.startswith("flash_attn")
            if not own and not names & (extras if module in OPTIONAL else base):
                found.append(f"{place} imports {module}, which pyproject.toml does not list")
    assert found == []


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    loose = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line)]
    assert loose == [], "constraints.txt takes lines of the form name==version, with no local version such as +cpu"
    return {canonicalize_name(name): Version(version) for name, version in (line.split("==") for line in lines)}


def test_constraints_pin_every_dependency():
    pinned = pins()
    missing = [str(r) for r in requirements(*PINNED_EXTRAS) if canonicalize_name(r.name) not in pinned]
    outside = [
        f"{requirement} excludes the pinned {pinned[canonicalize_name(requirement.name)]}"
        for requirement in requirements(*PINNED_EXTRAS)
        if canonicalize_name(requirement.name) in pinned
        and not requirement.specifier.contains(pinned[canonicalize_name(requirement.name)], prereleases=True)
    ]
    assert missing == [] and outside == []
    assert str(pinned["torch"]) == "2.13.0"


# ---------------------------------------------------------------- the graph of imports


@cache
def import_graph(*, with_types: bool = False) -> dict[str, set[str]]:
    """Return which of our modules each one imports, at its top or inside a function, or for type hints alone."""
    names = {}
    for path in (path for package in (*PACKAGES, "benchmarks", "tests") for path in sources(package)):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    names["train"] = ROOT / "train.py"

    def imported(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    whole = f"{child.module}.{alias.name}"
                    yield whole if whole in names else child.module
            elif with_types or not is_type_checking(child):
                yield from imported(child)

    return {
        name: {found for found in imported(parsed(path)) if found in names and found != name}
        for name, path in names.items()
    }


def rooms(package: str) -> dict[str, set[str]]:
    """Return which rooms of a package each one imports, for type hints too. A room is a first-level folder or module.

    The package's own ``__init__`` is not a room: it gives names of its rooms to the outside, and no room imports it. A
    room's command, ``__main__``, which no room imports either, may use all rooms.
    """
    found: dict[str, set[str]] = {}
    for name, imported in import_graph(with_types=True).items():
        if name.startswith(f"{package}.") and not name.endswith(".__main__"):
            assert not any(other.endswith(".__main__") for other in imported), f"{name} imports a command"
            assert package not in imported, f"{name} imports the package's door"
            room = name.split(".")[1]
            inside = {other.split(".")[1] for other in imported if other.startswith(f"{package}.")}
            found.setdefault(room, set()).update(inside - {room})
    return found


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that can be reached from themselves."""

    def reachable(start: str) -> set[str]:
        found, left = set(), list(graph[start])
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += graph[name]
        return found

    return sorted(name for name in graph if name in reachable(name))


def test_imports_make_no_circle():
    graph = import_graph()
    assert len(graph) > 100 and "models.roles.load" in graph["models.verify"], "the graph is read"
    assert circles(graph) == []
    assert circles(graph | {"fsdp_cp.errors": {"train"}}), "the check sees a circle"
    of_tests, of_benchmarks = (
        {found for name in graph if name.startswith(own) for found in graph[name] if found.startswith(others)}
        for own, others in (("benchmarks", "tests"), ("tests.oracles", "benchmarks"))
    )
    shared = {"tests.tiny_pipeline", "tests.pools"}  # a documented command; ranks for tests and benchmarks
    assert "tests.oracles.runs" in of_tests and all(name.startswith("tests.oracles") for name in of_tests - shared)
    assert of_benchmarks == set(), "benchmarks take their oracles from the tests, not the other way round"


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_one_way(package):
    graph = rooms(package)
    assert len(graph) > 5 and any(graph.values()), "rooms are read"
    assert circles(graph) == []
    room, other = next((room, min(imported)) for room, imported in graph.items() if imported)
    assert {room, other} <= set(circles(graph | {other: {*graph[other], room}})), "the check sees a pair"


def test_no_upward_link_hides_in_a_string():
    """``preload=(..., "models.roles.load")`` in a lower package is an import as well."""
    above = {"fsdp_cp": ("models", "distill", "train"), "models": ("distill", "train")}
    for package, upper in above.items():
        pattern = re.compile(rf"({'|'.join(upper)})\.[a-z_]+(\.[a-z_]+)*")
        for path in sources(package):
            texts = [
                node.value
                for node in ast.walk(parsed(path))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            assert not [text for text in texts if pattern.fullmatch(text)], path
