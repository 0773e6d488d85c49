"""One run a folder: the second is refused and changes nothing."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mtp_research.app.cli import run_entry
from mtp_research.config.schema import TrainConfig
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.files import OWNER_FILE, is_held_by_others, run_lock


def hold(root, is_held, may_end):
    with run_lock(root):
        is_held.set()
        may_end.wait(60)


@contextmanager
def held_by_another(root: Path) -> Iterator[None]:
    """A process that holds the lock of a folder."""
    context = multiprocessing.get_context("fork")
    is_held, may_end = context.Event(), context.Event()
    holder = context.Process(target=hold, args=(root, is_held, may_end))
    holder.start()
    try:
        assert is_held.wait(60)
        yield
    finally:
        may_end.set()
        holder.join()


def test_run_lock_second_process_is_refused(tmp_path):
    with (
        held_by_another(tmp_path),
        pytest.raises(ConfigError, match="in use by another run"),
        run_lock(tmp_path),
    ):
        pass
    with run_lock(tmp_path):
        pass


def test_folder_that_others_hold_is_told_from_all_others(tmp_path: Path) -> None:
    assert not is_held_by_others(tmp_path)
    with run_lock(tmp_path):
        assert not is_held_by_others(tmp_path)
    with held_by_another(tmp_path):
        assert is_held_by_others(tmp_path)
    assert not is_held_by_others(tmp_path)
    (tmp_path / OWNER_FILE).write_text("process 1 on a machine that was switched off")
    assert not is_held_by_others(tmp_path)
    with run_lock(tmp_path):  # to ask has left the lock free
        pass


def test_second_run_in_a_folder_exits_2_and_leaves_the_first_s_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(config: TrainConfig, folder: Path) -> None:
        pass

    assert run_entry(TrainConfig, ends, argv=["seed=1", f"output_dir={tmp_path}"]) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    words = ["seed=2", f"output_dir={tmp_path}"]
    with run_lock(tmp_path):  # as the first run holds it while it works
        code = run_entry(TrainConfig, lambda *_: pytest.fail("must not run"), argv=words)
    assert code == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert "is in use by another run" in capsys.readouterr().err


def test_new_folder_of_a_refused_run_is_gone_and_no_other(tmp_path: Path) -> None:
    new, used, old = (tmp_path / name for name in ("above/new", "used", "old"))
    old.mkdir()
    for root in (new, used, old):
        with suppress(ConfigError), run_lock(root):
            if root == used:
                (root / "error.txt").touch()
            raise ConfigError("refused")
    assert not new.parent.exists()
    assert {path.name for path in used.iterdir()} == {".lock", "error.txt"}
    assert old.is_dir()


def test_name_that_no_folder_can_have_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    with (
        pytest.raises(EnvironmentFault, match="must be a writable folder"),
        run_lock(tmp_path / ("long" * 100)),
    ):
        pass
