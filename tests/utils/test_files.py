import errno
import fcntl
import subprocess
import sys

import pytest

from duetgan.utils.errors import UserError
from duetgan.utils.files import check_writable, hold, replace_file, write_atomic
from tests.conftest import assert_raises


def test_a_file_is_held_alone_and_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys):
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert [hold(first), hold(second)] == [True, False]
        assert capsys.readouterr().err == ""

        def none(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", none)
        assert hold(second)
    assert capsys.readouterr().err == (
        "warning: files cannot be locked (No locks available): run only one process in this folder\n"
    )


@pytest.mark.parametrize("cut_short", ["fsync", "replace"])
@pytest.mark.parametrize("before", [b"old", None])
def test_a_write_cut_short_leaves_what_was_there(tmp_path, monkeypatch, cut_short, before):
    path = tmp_path / "status.json"
    if before is not None:
        replace_file(path, before)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{cut_short}", full)
        assert_raises(OSError, "No space left", replace_file, path, b"new")
        with pytest.raises(
            UserError, match=r"cannot write .*status.json: No space left on device; choose another place"
        ):
            write_atomic(path, b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == ([] if before is None else [before])
    replace_file(path, b"new")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"new"]


def test_missing_folders_are_an_error_or_made_and_writing_is_tried_without_a_trace(tmp_path):
    check_writable(tmp_path / "new" / "deep")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "a" / "x", b"1")
    write_atomic(str(tmp_path / "a" / "b" / "x"), b"1")
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"1"
    for taken in (tmp_path / "a" / "b" / "x" / "y", tmp_path / "a"):  # below a file, and in a folder's place
        assert_raises(UserError, "cannot write", write_atomic, taken, b"2")
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"1"]
    (tmp_path / "file").write_text("in the way")
    assert_raises(UserError, r"file/results: cannot be written", check_writable, tmp_path / "file" / "results")


def test_a_file_is_as_readable_as_the_process_says(tmp_path):
    code = f"from duetgan.utils.files import write_atomic; write_atomic({str(tmp_path / 'x')!r}, b'1')"
    subprocess.run([sys.executable, "-c", code], check=True, umask=0o027)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
