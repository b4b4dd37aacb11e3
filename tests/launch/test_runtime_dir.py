"""The service's own folder: private, fresh, gone at the end, swept after a kill."""

import stat
from pathlib import Path

import pytest

from rlt.launch.runtime_dir import service_dir
from rlt.runtime.errors import ConfigError


def test_each_service_gets_a_private_folder_that_goes_with_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    with service_dir(base) as first, service_dir(base) as second:
        assert first != second
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
        assert first.exists(), "the second service swept a living one"
    assert list(base.glob("s-*")) == []


def test_what_a_killed_launcher_left_is_swept(tmp_path: Path) -> None:
    for name in ("s-without-lock", "s-with-lock"):
        (tmp_path / name).mkdir()
    (tmp_path / "s-with-lock" / "lock").touch()
    (tmp_path / "mine").mkdir()
    with service_dir(tmp_path) as folder:
        assert {path.name for path in tmp_path.iterdir()} == {"lock", "mine", folder.name}


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="--runtime-dir"), service_dir(tmp_path):
        pass


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    base = tmp_path / ("x" * 90)
    with pytest.raises(ConfigError, match="too long"), service_dir(base):
        pass
    assert list(base.glob("s-*")) == []
