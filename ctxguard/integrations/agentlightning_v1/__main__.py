"""``python -m ctxguard.integrations.agentlightning_v1 data.train_files=… data.val_files=… KEY=VALUE …``

Trains with `GuardedTrainer`. The configuration is Agent Lightning 1.0's, ``agentlightning/verl/config.yaml``,
changed by ``KEY=VALUE`` as in Hydra, and its section ``ctxguard`` (`GuardSettings`), e.g.
``ctxguard.failure_handling=penalize(-1)``. Tasks are read from ``data.train_files`` and ``data.val_files``:
JSON, JSON Lines or Parquet, one task a row; each becomes a rollout's ``input``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ctxguard.errors import ConfigurationError

_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_config(overrides: Sequence[str]) -> Any:
    """Agent Lightning's configuration with changes.

    Raises:
        ConfigurationError: an argument is no ``KEY=VALUE``.
    """
    import importlib.resources

    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    for override in overrides:
        if "=" not in override:
            raise ConfigurationError(f"argument {override!r} is no KEY=VALUE")
    folder = str(importlib.resources.files("agentlightning.verl"))
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose(config_name="config")
    OmegaConf.set_struct(config, False)  # as Agent Lightning's examples do: keys of one's own are welcome
    return OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides)))


def read_tasks(files: str | Sequence[str] | None, key: str) -> list[dict[str, Any]]:
    """The tasks in files.

    Args:
        files: one path or several.
        key: the setting that named them, for the error.

    Raises:
        ConfigurationError: none is named, or one has another format.
    """
    from datasets import load_dataset

    paths = [files] if isinstance(files, str) else list(files or ())
    if not paths:
        raise ConfigurationError(f"{key} is not set: name a JSON, JSON Lines or Parquet file of tasks")
    tasks: list[dict[str, Any]] = []
    for path in paths:
        suffix = "." + str(path).rpartition(".")[2]
        if suffix not in _READERS:
            raise ConfigurationError(f"{key}={path}: tasks are read from {', '.join(_READERS)} only")
        tasks += load_dataset(_READERS[suffix], data_files=str(path), split="train").to_list()
    return tasks


def main(arguments: Sequence[str]) -> None:
    """Read configuration and tasks, and train."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
        return
    from ctxguard.integrations.agentlightning_v1.entrypoint import run_ppo

    config = read_config(arguments)
    train, val = (read_tasks(config.data.get(name), f"data.{name}") for name in ("train_files", "val_files"))
    run_ppo(config, train, val)


if __name__ == "__main__":
    main(sys.argv[1:])
