"""The configuration: typed by dataclasses, composed from ``configs/`` by Hydra, checked before anything is built."""

from distill.config.compose import compose_config, load_config
from distill.config.schema import (
    SETTINGS,
    CheckpointSettings,
    Config,
    EmaSettings,
    LogSettings,
    OptimizerSettings,
    RoleSettings,
    SampleSettings,
)

__all__ = [
    "SETTINGS",
    "CheckpointSettings",
    "Config",
    "EmaSettings",
    "LogSettings",
    "OptimizerSettings",
    "RoleSettings",
    "SampleSettings",
    "compose_config",
    "load_config",
]
