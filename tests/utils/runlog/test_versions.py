"""The commit that a result comes from."""

import importlib.metadata
import os
import platform
import subprocess

import pytest
import torch
import torchvision

from duetgan.utils.runlog.versions import ROOT, commit, environment, versions


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.py").write_text("a = 1\n")
    git(folder, "add", "a.py")
    git(folder, "commit", "-q", "-m", "first")
    commit.cache_clear()
    return folder


def test_the_commit_and_whether_files_differ_from_it(checkout, monkeypatch):
    """U18: untracked files are no local changes."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of another repository
    with monkeypatch.context() as patch:
        patch.delenv("GIT_DIR")
        head = git(checkout, "rev-parse", "--short=12", "HEAD")
        git(checkout, "tag", "v1.0")
    assert commit(checkout) == head
    assert len(head) == 12
    (checkout / "notes.txt").write_text("not tracked")
    commit.cache_clear()
    assert commit(checkout) == head
    (checkout / "a.py").write_text("a = 2\n")
    commit.cache_clear()
    assert commit(checkout) == f"{head}-dirty"


def test_no_commit_where_there_is_none_and_a_git_that_hangs_is_not_waited_for(checkout, tmp_path, monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    below = checkout / "site-packages"  # installed inside somebody else's repository
    below.mkdir()
    assert commit(below) is None
    commit.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", hang)
        assert commit(checkout) is None
    commit.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert commit(checkout) is None


def test_for_people_a_dirty_commit_has_local_changes(monkeypatch):
    monkeypatch.setattr(
        "duetgan.utils.runlog.versions.commit", lambda checkout: "0123456789ab-dirty" if checkout == ROOT else None
    )
    assert environment()["commit"] == "0123456789ab with local changes"


def test_each_version_is_that_of_its_own_package(monkeypatch):
    monkeypatch.setattr("duetgan.utils.runlog.versions.commit", lambda checkout: f"commit of {checkout.name}")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"version of {package}")
    for name in ("python_version", "platform", "processor"):
        monkeypatch.setattr(platform, name, lambda name=name: f"this {name}")
    monkeypatch.setattr(os, "cpu_count", lambda: 77)
    monkeypatch.setattr(torch, "__version__", "1.2+x")
    monkeypatch.setattr(torchvision, "__version__", "3.4+y")
    git = f"commit of {ROOT.name}"
    python = {"python": "this python_version"}
    assert versions() == {**python, "torch": "1.2+x", "torchvision": "3.4+y", "git": git}
    found = environment()
    found.pop("accelerator", None)
    packages = {name: f"version of {name}" for name in ("torch", "torchvision", "numpy", "lmdb")}
    place = {"platform": "this platform", "processor": "this processor", "cores": "77"}
    assert found == {**python, **packages, **place, "commit": git}
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "this machine")
    assert environment()["processor"] == "this machine"
