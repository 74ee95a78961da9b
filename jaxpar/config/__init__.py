"""Typed configs of a run: defaults, then a YAML file, then flags.

Pure Python, no JAX: a bad config is refused before anything heavy is imported. Unknown keys and flags exit 2 and name the
nearest; `validate` refuses every combination that cannot run and says what would.
"""

from jaxpar.config.environment import check_environment
from jaxpar.config.flags import Help, add_flags, load, parse
from jaxpar.config.hints import nearest
from jaxpar.config.presets import PRESETS
from jaxpar.config.schema import (
    SECTIONS,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    from_dict,
    from_yaml,
    to_dict,
    to_yaml,
)
from jaxpar.config.validation import validate

__all__ = [
    "PRESETS",
    "SECTIONS",
    "ConfigError",
    "DataConfig",
    "Help",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "add_flags",
    "check_environment",
    "from_dict",
    "from_yaml",
    "load",
    "nearest",
    "parse",
    "to_dict",
    "to_yaml",
    "validate",
]
