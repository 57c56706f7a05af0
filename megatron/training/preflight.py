"""Checks everything that can be checked before a rank starts: settings, data, tokenizer, folders, checkpoint.

Called by `pretrain_gpt.py --preflight-only` (which `trainmover run` does once for the job) and by every rank before
it joins. Imports no torch, changes nothing, and says what is wrong in one line with exit code 2.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron.training import checkpoint_files
from megatron.training.arguments import build_parser, parse_settings
from megatron.training.checkpoint_facts import check_resume, with_checkpoint_shape
from megatron.training.config import CheckpointSettings, Settings, SettingsError
from megatron.training.data_files import DataError, check_indexed_dataset, fit_split, parse_blend, parse_split
from megatron.training.environment import cuda_may_be_there, read_environment
from megatron.training.layout import Plan, resolve
from megatron.training.tokenizer import TokenizerError, padded_vocab_size, tokenizer_for
from megatron.training.validation import check_plan, warnings_of

EXIT_USAGE = 2


def plan_run(
    argv: Sequence[str], *, world_size: int, on_cuda: bool, joins: bool = False
) -> tuple[Plan, tuple[str, ...]]:
    """(plan, warnings) of a command line after all checks. Raises SettingsError in one line.

    `joins`: the rank is built to take another's place in a running job. It loads nothing, and what the job has saved
    meanwhile is the job's own.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = parse_settings(argv)
    try:
        if settings.checkpoint.use_checkpoint_args:
            settings = _with_shape_of_checkpoint(settings)
        plan = resolve(settings, world_size=world_size, on_cuda=on_cuda)
        check_plan(plan)
        plan, dropped = _check_data(plan)
        plan = dataclasses.replace(plan, padded_vocab_size=_padded_vocab_size(plan))
        passed_over = () if joins else _check_load(plan)
        _check_folders(plan, joins=joins)
    except (DataError, TokenizerError, checkpoint_files.CheckpointError) as error:
        raise SettingsError(str(error)) from error
    return plan, (*(str(item.message) for item in caught), *warnings_of(plan), *dropped, *passed_over)


def preflight_main(argv: Sequence[str]) -> int:
    """Entry of `--preflight-only`: 0, or 2 after one line on stderr. WORLD_SIZE tells the number of ranks."""
    if "--help" in argv:
        build_parser().print_help()
        return 0
    try:
        _, lines = plan_run(argv, world_size=read_environment().world_size, on_cuda=cuda_may_be_there())
    except SettingsError as error:
        print(usage_line(error), file=sys.stderr)
        return EXIT_USAGE
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
    return 0


def usage_line(error: SettingsError) -> str:
    """The one line that tells a user what is wrong."""
    return f"pretrain_gpt.py: error: {' '.join(str(error).split())}"


def _with_shape_of_checkpoint(settings: Settings) -> Settings:
    if settings.checkpoint.load is None:
        raise SettingsError("--use-checkpoint-args needs --load")
    found = checkpoint_files.find_checkpoint(Path(settings.checkpoint.load), settings.checkpoint.ckpt_step).checkpoint
    return with_checkpoint_shape(settings, found) if found else settings


def _check_data(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with a split that leaves no part empty, and what to tell about it."""
    data = plan.settings.data
    parse_split(data.split or "")
    if data.mock_data:
        return plan, ()
    sequences: dict[str, int] = {}
    for paths in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        for _, prefix in parse_blend(paths) if paths else ():
            sequences[prefix] = check_indexed_dataset(prefix).sequences
            _check_index_folder(prefix, data.data_cache_path)
    if not data.data_path:
        return plan, ()
    split, dropped = fit_split(data.split or "", list(sequences.values()))
    settings = dataclasses.replace(plan.settings, data=dataclasses.replace(data, split=split))
    lines = tuple(f"--split {data.split} leaves no document for {name}: there will be none" for name in dropped)
    return dataclasses.replace(plan, settings=settings), lines


def _check_index_folder(prefix: str, cache_path: str | None) -> None:
    """Without --data-cache-path megatron-core writes the indices of its samples below the data; those there may do."""
    if cache_path is None and not (Path(prefix) / "cache").is_dir():
        _check_writable("the cache of", Path(prefix), "give --data-cache-path")


def _padded_vocab_size(plan: Plan) -> int:
    tokenizer = tokenizer_for(plan.settings.data)
    parallel = plan.settings.parallel
    return padded_vocab_size(
        tokenizer.vocab_size, plan.settings.model.make_vocab_size_divisible_by, parallel.tensor_model_parallel_size
    )


def _check_load(plan: Plan) -> tuple[str, ...]:
    """Warnings about damaged checkpoints; raises when the one to be loaded does not fit."""
    settings = plan.settings.checkpoint
    if settings.load is None:
        return ()
    choice = checkpoint_files.find_checkpoint(Path(settings.load), settings.ckpt_step)
    if choice.checkpoint is not None:
        check_resume(plan, choice.checkpoint)
    elif settings.exit_on_missing_checkpoint:
        raise SettingsError(
            f"--load {settings.load} holds no checkpoint, and --exit-on-missing-checkpoint asks for one"
        )
    return tuple(f"passed over a damaged checkpoint: {text}" for text in choice.passed_over)


def _check_folders(plan: Plan, *, joins: bool) -> None:
    settings = plan.settings
    folders = {
        "--save": settings.checkpoint.save,
        "--tensorboard-dir": settings.logging.tensorboard_dir,
        "--data-cache-path": settings.data.data_cache_path,
    }
    for name, folder in folders.items():
        if folder is not None:
            _check_writable(name, Path(folder))
    if settings.logging.metrics_file is not None:
        metrics_file = Path(settings.logging.metrics_file)
        if metrics_file.is_dir():
            raise SettingsError(f"--metrics-file {metrics_file} is a folder; give the path of a file")
        _check_writable("--metrics-file", metrics_file.parent)
    if not joins:
        _check_not_overwriting(settings.checkpoint)


def _check_not_overwriting(settings: CheckpointSettings) -> None:
    """A run that does not go on from what --save holds would mix its checkpoints with another run's."""
    save, load = settings.save, settings.load
    if save is None:
        return
    existing = checkpoint_files.saved_iterations(Path(save))
    is_loaded = load is not None and Path(load).resolve() == Path(save).resolve()
    if existing and not is_loaded:
        raise SettingsError(
            f"--save {save} already holds checkpoints (newest: iteration {existing[-1]}) that this run would "
            f"overwrite; add --load {save} to go on from them, or give another folder"
        )
    if existing and settings.finetune:
        raise SettingsError(
            f"--save {save} already holds checkpoints (newest: iteration {existing[-1]}), and --finetune starts again "
            "at iteration 0; give another folder to save in"
        )


def _check_writable(name: str, folder: Path, advice: str = "give another path") -> None:
    """A folder that is there must be a writable folder; one that is not must be one that can be made."""
    try:
        ancestor = folder
        while not ancestor.exists() and ancestor != ancestor.parent:
            ancestor = ancestor.parent
        is_folder = ancestor.is_dir()
        is_writable = os.access(ancestor, os.W_OK | os.X_OK) and not _is_read_only(ancestor)
    except OSError as error:
        raise SettingsError(f"{name} {folder}: {error.strerror}; {advice}") from error
    if not is_folder:
        raise SettingsError(f"{name} {folder}: {ancestor} is not a folder; {advice}")
    if not is_writable:
        raise SettingsError(f"{name} {folder}: {ancestor} is not writable; {advice}")


def _is_read_only(folder: Path) -> bool:
    """Whether nobody can write there, which root's permissions do not show: mounted read-only, or such as /proc."""
    system = os.statvfs(folder)
    holds_no_data = system.f_blocks == 0 and not folder.stat().st_mode & 0o222
    return bool(system.f_flag & os.ST_RDONLY) or holds_no_data
