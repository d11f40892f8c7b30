"""Configuration: dataclasses define its types, Hydra composes it from ``configs/``, and checks run before any build."""

from distill.config.compose import compose_config, load_config
from distill.config.schema import Config

__all__ = ["Config", "compose_config", "load_config"]
