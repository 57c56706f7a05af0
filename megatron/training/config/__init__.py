"""All settings of a run, one dataclass a subject; each field is one command-line flag (see `flag.py`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from megatron.training.config.model import ModelSettings, MoeSettings
from megatron.training.config.parallelism import ParallelSettings
from megatron.training.config.storage import CheckpointSettings, DataSettings, LoggingSettings
from megatron.training.config.training import OptimizerSettings, RunSettings

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "LoggingSettings",
    "ModelSettings",
    "MoeSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "RunSettings",
    "Settings",
    "SettingsError",
]


class SettingsError(ValueError):
    """The user's settings cannot work; the message is one line: found, expected, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that a command line and a YAML file can say."""

    model: ModelSettings = field(default_factory=ModelSettings)
    moe: MoeSettings = field(default_factory=MoeSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    run: RunSettings = field(default_factory=RunSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    data: DataSettings = field(default_factory=DataSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)


SUBJECTS: dict[str, type] = {
    "model": ModelSettings,
    "moe": MoeSettings,
    "parallel": ParallelSettings,
    "run": RunSettings,
    "optimizer": OptimizerSettings,
    "checkpoint": CheckpointSettings,
    "data": DataSettings,
    "logging": LoggingSettings,
}
assert list(SUBJECTS) == [f.name for f in dataclasses.fields(Settings)]
