"""Who may import whom, and who must stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "launch": {"coordinator", "prefill", "decode", "connector", "runtime"},
    "coordinator": {"connector", "runtime"},
    "prefill": {"connector", "runtime"},
    "decode": {"connector", "runtime"},
    "connector": {"runtime"},
    "runtime": {"kernels"},
    "kernels": set(),
}
HEAVY = ("torch", "triton", "nixl", "transformers")
LIGHT = {
    "connector": "messages codec channel geometry handoff sender receiver config",
    "runtime": "types errors events config clock story request exit_policy scheduler admission "
    "kv_manager plans interfaces",
    "launch": "cli worker ask chat answer options parser supervisor children console processes "
    "runtime_dir arrival signals loop crew restart reaped started supervisor_link "
    "line_writer ctl ctl_options rolling service_view",
}
# What the coordinator may use of the folders below it: messages, channels and plain values.
COORDINATOR_MAY_USE = {
    "connector": {"messages", "codec", "channel", "config", "geometry", "asks"},
    "runtime": {
        *("types", "errors", "config", "clock", "story", "interfaces", "events"),
        *("prompt", "validate", "stop_text"),
    },
}


def imports_of(path: Path, root: Path = ROOT) -> set[tuple[str, str]]:
    """(folder, module) of every import that leaves the file's own folder; the module is empty for
    an import of the folder itself. An absolute import of our folders counts as a violation."""
    up = len(path.relative_to(root).parts)  # this many dots leave the file's own folder
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level >= up:
            if node.module:
                folder, _, module = node.module.partition(".")
                found |= {(folder, module or alias.name) for alias in node.names}
            else:
                found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(f"absolute import of {a.name}", "") for a in node.names if _is_ours(a.name)}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            found.add((f"absolute import of {node.module}", ""))
    return found


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in {"rlt", *MAY_IMPORT}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_arrows_point_down(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        used = {name for name, _ in imports_of(path)}
        assert used <= MAY_IMPORT[folder] | {folder}, path


def test_the_coordinator_uses_messages_and_plain_values_alone() -> None:
    for path in (ROOT / "coordinator").rglob("*.py"):
        for folder, module in imports_of(path):
            assert module.split(".")[0] in COORDINATOR_MAY_USE[folder], f"{path}: {folder}.{module}"


@pytest.mark.parametrize(
    "line",
    [
        "from ..connector import messages",
        "from ..connector.messages import Commit",
        "import kernels.reference",
        "import rlt.decode.engine",
        "from rlt.decode.engine import DecodeEngine",
        "from .. import decode",
        "def late():\n    from ..prefill.engine import PrefillEngine",
    ],
)
def test_the_arrow_test_sees_a_planted_violation(line: str, tmp_path: Path) -> None:
    file = tmp_path / "runtime" / "planted.py"
    file.parent.mkdir()
    file.write_text(line)
    assert not {name for name, _ in imports_of(file, tmp_path)} <= MAY_IMPORT["runtime"]


def test_a_violation_in_a_subfolder_is_seen_too(tmp_path: Path) -> None:
    file = tmp_path / "runtime" / "models" / "planted.py"
    file.parent.mkdir(parents=True)
    file.write_text("from ...connector.messages import Commit\nfrom ..types import Stamp")
    assert imports_of(file, tmp_path) == {("connector", "messages")}


def light_modules() -> list[str]:
    files = sorted((ROOT / "coordinator").rglob("*.py"))
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if not path.stem.startswith("__")
    ]
    names += [f"{folder}.{name}" for folder, listed in LIGHT.items() for name in listed.split()]
    return [f"rlt.{name}" for name in names]


def test_the_control_plane_loads_no_torch() -> None:
    """One process per run, which reports after each module what came with it."""
    code = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [h for h in {HEAVY!r} if h in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_client_library_needs_pyzmq_and_msgspec_alone() -> None:
    code = (
        "import sys, asyncio, zmq, msgspec\n"
        "before = set(sys.modules)\n"
        "import rlt.coordinator.client as _\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["rlt"]


def test_package_files_hold_a_docstring_and_nothing_else() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("__init__.py"):
            body = ast.parse(path.read_text()).body
            assert len(body) == 1 and isinstance(body[0], ast.Expr), path


def test_every_module_opens_with_what_it_owns() -> None:
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            assert ast.get_docstring(ast.parse(path.read_text())), path
