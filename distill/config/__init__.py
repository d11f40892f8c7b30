"""Configuration: dataclasses define its types, Hydra composes it from ``configs/``, and checks run before any build."""

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
