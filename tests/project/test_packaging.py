"""What is installed is what is in the tree, and stays out of other packages' way."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from .test_imports import MAY_IMPORT, ROOT

EMBEDDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def test_the_listed_packages_are_the_folders() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".")
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert {name.removeprefix("rlt.") for name in settings["packages"]} == folders
    for name, path in settings["package-dir"].items():
        assert name == "rlt." + path.replace("/", ".")
    assert set(settings["package-dir"]) == set(settings["packages"])


def test_no_folder_of_modules_lacks_its_package_file() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_transformers_loads_when_the_repository_is_the_working_directory() -> None:
    """transformers looks for a package called kernels; it must not find our folder."""
    code = (
        "import importlib.util as u, transformers, sys\n"
        "spec = u.find_spec('kernels')\n"
        f"sys.exit(spec is not None and str(spec.origin).startswith({str(ROOT / 'kernels')!r}))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_children_are_started_so_that_the_working_directory_is_not_searched() -> None:
    from rlt.coordinator.config import CoordinatorConfig
    from rlt.launch.processes import coordinator_process

    spec = coordinator_process(CoordinatorConfig(runtime_dir="/tmp/x"))
    assert spec.command[:2] == (sys.executable, "-P")
    assert spec.environment["PYTHONSAFEPATH"] == "1"


@pytest.mark.soak
def test_the_wheel_holds_every_module_and_the_embedded_model(tmp_path: Path) -> None:
    tree = tmp_path / "tree"  # a copy: building leaves its folders in the tree
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in MAY_IMPORT:
        shutil.copytree(ROOT / folder, tree / folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "-q", "--no-deps", "-w", str(tmp_path), "."],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    sources = {
        f"rlt/{path.relative_to(tree)}"
        for folder in MAY_IMPORT
        for path in (tree / folder).rglob("*.py")
    }
    assert sources <= names
    assert {f"rlt/launch/embedded/{name}" for name in EMBEDDED} <= names
    pages = {path.name for path in (tree / "coordinator" / "http" / "page").iterdir()}
    assert pages and {f"rlt/coordinator/http/page/{name}" for name in pages} <= names
    assert all(name.startswith("rlt/") for name in names)
