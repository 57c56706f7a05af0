"""Claims about checkpoints as files: whatever a kill or a disk leaves behind, only a whole one is ever taken."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.training import checkpoint_files
from megatron.training.checkpoint_files import (
    MANIFEST,
    TRACKER,
    CheckpointError,
    begin,
    damage_of,
    find_checkpoint,
    finish,
    folder_of,
    partial_folder_of,
    replaced_folder_of,
    saved_iterations,
    set_aside_later,
)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def save(root: Path, iteration: int, content: str = "weights") -> Path:
    partial = begin(root, iteration)
    (partial / "__0_0.distcp").write_text(content)
    (partial / "inner").mkdir()
    (partial / "inner" / "common.pt").write_text("small")
    finish(root, iteration, {"content": content})
    return folder_of(root, iteration)


def newest(root: Path) -> tuple[int, str] | None:
    """Iteration and content of what would be loaded, read back from its files."""
    found = find_checkpoint(root).checkpoint
    if found is None:
        return None
    content = (found.folder / "__0_0.distcp").read_text()
    assert found.facts == {"content": content}
    assert (found.folder / "inner" / "common.pt").read_text() == "small"
    return found.iteration, content


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    replacement = change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest if replacement is None else replacement))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


def test_a_finished_save_is_the_newest_and_the_tracker_names_it(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "checkpoints"
    save(root, 10)
    folder = save(root, 20)
    choice = find_checkpoint(root)
    assert choice.checkpoint is not None
    assert (choice.checkpoint.folder, choice.checkpoint.iteration, choice.passed_over) == (folder, 20, ())
    assert (root / TRACKER).read_text() == "20"
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000010", "iter_0000020", TRACKER]
    assert json.loads((folder / MANIFEST).read_text())["files"] == {"__0_0.distcp": 7, "inner/common.pt": 5}


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path).checkpoint is None
    assert find_checkpoint(tmp_path / "absent").checkpoint is None
    begin(tmp_path, 10)
    assert find_checkpoint(tmp_path).checkpoint is None
    assert saved_iterations(tmp_path) == ()


def test_the_tracker_is_a_hint_only(tmp_path: Path) -> None:
    save(tmp_path, 10)
    for text in ("99", "", "nonsense"):
        (tmp_path / TRACKER).write_text(text)
        assert newest(tmp_path) == (10, "weights")
    (tmp_path / TRACKER).unlink()
    assert newest(tmp_path) == (10, "weights")


def test_iterations_are_sorted_as_numbers(tmp_path: Path) -> None:
    for iteration in (9_999_999, 10_000_000, 0):
        save(tmp_path, iteration)
    assert saved_iterations(tmp_path) == (0, 9_999_999, 10_000_000)
    assert newest(tmp_path) == (10_000_000, "weights")


@pytest.mark.parametrize(
    "name", ["iter_20", "iter_00000020", "iter_000002x", "iter_٠٠٠٠٠٢٠", "xiter_0000020", "release"]
)
def test_a_folder_with_another_name_is_not_a_checkpoint(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    shutil.copytree(folder_of(tmp_path, 10), tmp_path / name)
    assert saved_iterations(tmp_path) == (10,)
    assert find_checkpoint(tmp_path).passed_over == ()


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing file": (lambda folder: (folder / "__0_0.distcp").unlink(), "lacks '__0_0.distcp'"),
    "a missing inner file": (lambda folder: shutil.rmtree(folder / "inner"), "lacks 'inner/common.pt'"),
    "a truncated file": (lambda folder: os.truncate(folder / "__0_0.distcp", 3), "has 3 bytes, expected 7"),
    "a longer file": (lambda folder: (folder / "__0_0.distcp").write_text("weights!"), "has 8 bytes, expected 7"),
    "a folder for a file": (lambda folder: make_folder(folder / "__0_0.distcp"), "lacks '__0_0.distcp'"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "its save never finished"),
    "a cut manifest": (lambda folder: os.truncate(folder / MANIFEST, 50), "unreadable"),
    "an empty manifest": (lambda folder: os.truncate(folder / MANIFEST, 0), "unreadable"),
    "a binary manifest": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), "unreadable"),
    "a deep manifest": (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "unreadable"),
    "a folder for a manifest": (lambda folder: make_folder(folder / MANIFEST), "unreadable"),
    "a folder that is a file": (lambda folder: make_file(folder), "not there"),
    "an older version": (lambda folder: change_manifest(folder, lambda m: m.update(manifest_version=0)), "version"),
    "another iteration": (lambda folder: change_manifest(folder, lambda m: m.update(iteration=10)), "iteration 10"),
    "no files": (lambda folder: change_manifest(folder, lambda m: m.update(files={})), "without files"),
    "pairs for files": (lambda folder: change_manifest(folder, lambda m: m.update(files=[[3, 1]])), "without files"),
    "no facts": (lambda folder: change_manifest(folder, lambda m: {**m, "facts": [1]}), "or facts"),
    "a text for a size": (
        lambda folder: change_manifest(folder, lambda m: m.update(files={"__0_0.distcp": "7"})),
        "has 7 bytes, expected '7'",
    ),
    "an absolute name": (
        lambda folder: change_manifest(folder, lambda m: m["files"].update({"/etc/hostname": 1})),
        "names '/etc/hostname', outside",
    ),
    "a name of a parent": (
        lambda folder: change_manifest(folder, lambda m: m["files"].update({"inner/../../x": 1})),
        "names 'inner/../../x', outside",
    ),
    "a name too long": (lambda folder: change_manifest(folder, lambda m: m["files"].update({"x" * 999: 1})), "lacks"),
    "a name with a zero": (lambda folder: change_manifest(folder, lambda m: m["files"].update({"a\0b": 1})), "lacks"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_whole_one(tmp_path: Path, case: str) -> None:
    damage, words = DAMAGES[case]
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    damage(folder)
    assert words in damage_of(folder)
    assert newest(tmp_path) == (10, "weights")
    (line,) = find_checkpoint(tmp_path).passed_over
    assert line == f"{folder}: {damage_of(folder)}"
    with pytest.raises(CheckpointError, match="give another --ckpt-step"):
        find_checkpoint(tmp_path, 20)
    shutil.rmtree(folder_of(tmp_path, 10))
    with pytest.raises(CheckpointError, match="no whole checkpoint in"):
        find_checkpoint(tmp_path)
    assert save(tmp_path, 20) == folder
    assert newest(tmp_path) == (20, "weights")


def test_an_extra_file_does_no_harm(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    (folder / "notes.txt").write_text("good one")
    assert damage_of(folder) == ""


def test_a_named_iteration_is_loaded_or_refused(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    found = find_checkpoint(tmp_path, 10).checkpoint
    assert found is not None
    assert found.iteration == 10
    for absent in (15, -1):
        with pytest.raises(CheckpointError, match="not there; give another --ckpt-step"):
            find_checkpoint(tmp_path, absent)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 999)):
        with pytest.raises(CheckpointError, match="give a folder of checkpoints"):
            find_checkpoint(root)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(
    manifest=st.fixed_dictionaries(
        {},
        optional={
            "manifest_version": st.just(1) | JSON,
            "iteration": st.just(20) | JSON,
            "files": st.just({"__0_0.distcp": 7}) | JSON,
            "facts": st.just({"content": "weights"}) | JSON,
        },
    )
    | JSON
)
@example(manifest={"manifest_version": 1, "iteration": 20, "files": {"": 1}, "facts": {}})
@example(manifest={"manifest_version": 1, "iteration": 20, "files": {"\ud800": 1}, "facts": {}})
@example(manifest={"manifest_version": 1, "iteration": True, "files": {"__0_0.distcp": 7}, "facts": {}})
def test_any_manifest_is_whole_or_damage_and_never_a_program_error(
    tmp_path_factory: pytest.TempPathFactory, manifest: Any
) -> None:
    root = tmp_path_factory.getbasetemp() / "any"
    folder = folder_of(root, 20) if root.exists() else save(root, 20)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    is_whole = isinstance(manifest, dict) and manifest == {
        "manifest_version": 1,
        "iteration": 20,
        "files": {"__0_0.distcp": 7},
        "facts": manifest.get("facts"),
    }
    if is_whole and isinstance(manifest["facts"], dict) and type(manifest["iteration"]) is int:
        assert damage_of(folder) == ""
        return
    assert damage_of(folder)
    with pytest.raises(CheckpointError):
        find_checkpoint(root)


STEPS = ("write", "fsync", "rename", "rmtree", "unlink", "mkdir")


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int, *, after: bool) -> list[str]:
    """Makes the file-system step of that `number` the last one, done or half done. Returns the list of steps taken."""
    taken: list[str] = []

    def counted(name: str, function: Callable[..., Any], half: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            taken.append(name)
            if len(taken) > number:
                raise Killed
            if len(taken) == number and not after:
                if half is not None:
                    half(*arguments)
                raise Killed
            result = function(*arguments, **options)
            if len(taken) == number:
                raise Killed
            return result

        return step

    def half_a_tree(path: Path, *_: object) -> None:
        for child in sorted(path.rglob("*.distcp")):
            child.unlink()

    def half_a_text(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])

    patch, path_type = monkeypatch.setattr, type(Path())
    patch(checkpoint_files, "_write", counted("write", checkpoint_files._write, half_a_text))
    patch(os, "fsync", counted("fsync", os.fsync))
    patch(shutil, "rmtree", counted("rmtree", shutil.rmtree, half_a_tree))
    for name in ("rename", "unlink", "mkdir"):
        patch(path_type, name, counted(name, getattr(path_type, name)))
    return taken


def steps_of(tmp_path: Path, before: tuple[int, ...], saved: int) -> int:
    """Number of file-system steps of a save that nothing interrupts."""
    root = tmp_path / "measured"
    for iteration in before:
        save(root, iteration, "old")
    partial_folder_of(root, 5).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        taken = kill_at(patch, 10_000, after=True)
        save(root, saved, "new")
    assert set(taken) >= set(STEPS) - {"unlink"}
    return len(taken)


@pytest.mark.parametrize("before", [(), (10,), (10, 20)], ids=str)
@pytest.mark.parametrize("after", [False, True], ids=["half done", "done"])
def test_a_kill_at_any_step_loses_nothing_whole_and_fools_nobody(
    tmp_path: Path, before: tuple[int, ...], after: bool
) -> None:
    total = steps_of(tmp_path, before, 20)
    older = (before[-1], "old") if before else None
    seen = set()
    for number in range(1, total + 1):
        root = tmp_path / str(number)
        for iteration in before:
            save(root, iteration, "old")
        partial_folder_of(root, 5).mkdir(parents=True)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number, after=after)
            with pytest.raises(Killed):
                save(root, 20, "new")
        found = newest(root)
        assert found in (older, (20, "new")), number
        seen.add(found)
        # The next save, of a run that went on from what it found, works and leaves no trace of the kill.
        save(root, 30, "next")
        assert newest(root) == (30, "next")
        shutil.rmtree(folder_of(root, 30))
        assert newest(root) == found, number
        assert not list(root.glob(".*iter_*"))
    assert seen == {older, (20, "new")}


@pytest.mark.parametrize("first", range(1, 24, 4))
def test_a_second_kill_during_the_tidying_loses_nothing_either(tmp_path: Path, first: int) -> None:
    for second in range(1, 12):
        root = tmp_path / str(second)
        save(root, 20, "old")
        for number in (first, second):
            with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
                kill_at(patch, number, after=second % 2 == 0)
                save(root, 20, "new")
            assert newest(root) in ((20, "old"), (20, "new"))
        save(root, 20, "last")
        assert newest(root) == (20, "last")


def test_a_kill_between_the_renames_keeps_the_replaced_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 20, "old")
    folder_of(tmp_path, 20).rename(replaced_folder_of(tmp_path, 20))
    assert saved_iterations(tmp_path) == (20,)
    assert newest(tmp_path) == (20, "old")
    assert find_checkpoint(tmp_path, 20).checkpoint is not None
    begin(tmp_path, 30)
    assert find_checkpoint(tmp_path).checkpoint == find_checkpoint(tmp_path, 20).checkpoint
    assert not replaced_folder_of(tmp_path, 20).exists()


def test_files_in_the_place_of_leftover_folders_are_no_obstacle(tmp_path: Path) -> None:
    partial_folder_of(tmp_path, 20).write_text("")
    replaced_folder_of(tmp_path, 20).write_text("")
    folder_of(tmp_path, 20).write_text("")
    save(tmp_path, 20)
    assert newest(tmp_path) == (20, "weights")


def test_every_file_and_folder_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    original = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    save(tmp_path, 20)
    partial = partial_folder_of(tmp_path, 20)
    assert synced == [
        *(str(partial / name) for name in ("__0_0.distcp", "inner", "inner/common.pt", MANIFEST)),
        *(str(partial), str(tmp_path), str(tmp_path / f".{TRACKER}.new"), str(tmp_path)),
    ]


def test_facts_that_cannot_be_written_leave_the_older_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (begin(tmp_path, 20) / "file").write_text("x")
    with pytest.raises(TypeError):
        finish(tmp_path, 20, {"content": object()})
    assert newest(tmp_path) == (10, "weights")


def test_later_checkpoints_are_kept_aside_and_no_longer_found(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    moved = set_aside_later(tmp_path, 10)
    assert [path.name for path in moved] == [".set-aside-iter_0000020", ".set-aside-iter_0000030"]
    newest = find_checkpoint(tmp_path).checkpoint
    assert newest is not None
    assert newest.iteration == 10
    save(tmp_path, 20)
    assert [path.name for path in set_aside_later(tmp_path, 10)] == [".set-aside-iter_0000020-2"]
    assert set_aside_later(tmp_path, 10) == ()
    assert all((path / MANIFEST).exists() for path in tmp_path.glob(".set-aside-*"))
