"""Reads the lengths that a verl (Hydra) configuration sets; the one file that knows omegaconf and yaml.

Both are optional and imported when they are needed: omegaconf for OmegaConf objects and for
interpolations (``${…}``), PyYAML for a file where omegaconf is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ctxguard.errors import BudgetError

_ROLLOUT = ("actor_rollout_ref.rollout.", "rollout.", "")
_PROMPT_KEYS = ("data.max_prompt_length", *(f"{place}prompt_length" for place in _ROLLOUT))
_RESPONSE_KEYS = ("data.max_response_length", *(f"{place}response_length" for place in _ROLLOUT))
# verl passes engine_kwargs to vLLM after its own arguments, so they override max_model_len.
_WINDOW_KEYS = tuple(
    place + key for place in _ROLLOUT for key in ("engine_kwargs.vllm.max_model_len", "max_model_len")
)
_AGGREGATOR = "agentlightning.trace_aggregator."
_LEVELS = ("transition", "trajectory")
_MISSING = "???"  # OmegaConf's mark of a value that must be given


@dataclass(frozen=True)
class Length:
    """A number of tokens, and the key under which it stands."""

    key: str
    tokens: int


@dataclass(frozen=True)
class RowLengths:
    """What Agent Lightning pads the row of a trajectory to; ``total`` is None where it is not bounded."""

    prompt: Length
    response: Length
    total: Length | None


@dataclass(frozen=True)
class VerlLengths:
    """What a configuration says.

    ``window`` is None where verl is left to choose it, ``row`` where the trainer makes a row of each call.
    """

    prompt: Length
    response: Length
    window: Length | None
    row: RowLengths | None


def read_verl_lengths(config: Mapping[str, Any] | str | os.PathLike[str]) -> VerlLengths:
    """The lengths in a mapping, an OmegaConf object or a YAML file.

    Raises:
        BudgetError: a key is missing, malformed, unresolvable or contradicts another.
    """
    if isinstance(config, str | os.PathLike):
        file = Path(config)
        tree = _load(file)
        place = f"the file {file}"
    elif isinstance(config, Mapping):
        tree = config
        place = "the configuration"
    else:
        raise BudgetError(
            f"config is a {type(config).__name__}, but must be a mapping, an OmegaConf object or the path of "
            "a YAML file",
            field="config",
            value=type(config).__name__,
        )
    look = _reader(tree)
    prompt = _find(look, _PROMPT_KEYS)
    response = _find(look, _RESPONSE_KEYS)
    if prompt is None:
        _missing(_PROMPT_KEYS, place, tree)
    if response is None:
        _missing(_RESPONSE_KEYS, place, tree)
    # Up to verl 0.6 a max_model_len of 0 means the same as null.
    window = _find(look, _WINDOW_KEYS, unset=0)
    return VerlLengths(prompt, response, window, _row_lengths(look, place, tree))


def _row_lengths(look: Callable[[str], object], place: str, tree: Mapping[str, Any]) -> RowLengths | None:
    """Agent Lightning's lengths of a row (0.3.0 ``verl/trainer.py:257``, 1.0.2 ``verl/trainer.py:402``)."""
    key = _AGGREGATOR + "level"
    level = look(key)
    if level is None or level == "transition":
        return None
    if level != "trajectory":
        raise BudgetError(
            f"{key} is {level!r}, but Agent Lightning knows only {' and '.join(map(repr, _LEVELS))}",
            field=key,
            value=level,
        )
    keys = [(f"{_AGGREGATOR}trajectory_max_{part}_length",) for part in ("prompt", "response", "total")]
    prompt, response, total = (_find(look, each) for each in keys)
    if prompt is None:
        _missing(keys[0], place, tree)
    if response is None:
        _missing(keys[1], place, tree)
    return RowLengths(prompt, response, total)


def _find(look: Callable[[str], object], keys: tuple[str, ...], *, unset: int | None = None) -> Length | None:
    """The length under the first of the keys that is set; all that are set must agree."""
    found: list[Length] = []
    for key in keys:
        value = look(key)
        if value is None or value == _MISSING:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise BudgetError(
                f"{key} is {value!r} ({type(value).__name__}), but must be a whole number of tokens",
                field=key,
                value=value,
            )
        if value == unset:
            continue
        if value < 1:
            raise BudgetError(
                f"{key} is {value}, but must be at least 1 token", field=key, value=value, limit=1
            )
        found.append(Length(key, value))
    for other in found[1:]:
        if other.tokens != found[0].tokens:
            raise BudgetError(
                f"{found[0].key} is {found[0].tokens}, but {other.key} is {other.tokens}: they mean the same "
                "length, so set one and leave the other to verl's default, or set both alike",
                field=other.key,
                value=other.tokens,
                limit=found[0].tokens,
            )
    return found[0] if found else None


def _missing(keys: tuple[str, ...], place: str, tree: Mapping[str, Any]) -> NoReturn:
    remedy = "set one of them, or make a ContextBudget from numbers"
    if "defaults" in tree:
        remedy = (
            "what its Hydra 'defaults' name is not read here, so pass the composed configuration "
            "(hydra.compose) instead"
        )
    names = [key for key in keys if "." in key]
    if len(names) == 1:
        what, remedy = f"no {names[0]}", remedy.replace("one of them", "it")
    else:
        what = f"none of {', '.join(names)}"
    raise BudgetError(f"{place} has {what}: {remedy}", field=names[0], value=None, keys=names)


def _reader(tree: Mapping[str, Any]) -> Callable[[str], object]:
    """A function from a dotted key to its value, None where it is not set."""
    if _is_omegaconf(tree):
        return lambda key: _select(tree, key)

    def look(key: str) -> object:
        node: object = tree
        names = key.split(".")
        for position, name in enumerate(names):
            if not isinstance(node, Mapping):
                return None
            node = node.get(name)
            if isinstance(node, str) and "${" in node:
                return _select(_as_omegaconf(tree, ".".join(names[: position + 1]), node), key)
        return node

    return look


def _is_omegaconf(tree: Mapping[str, Any]) -> bool:
    """Whether it is an OmegaConf object, told without importing omegaconf."""
    return any(kind.__module__.split(".")[0] == "omegaconf" for kind in type(tree).__mro__)


def _as_omegaconf(tree: Mapping[str, Any], key: str, value: str) -> Mapping[str, Any]:
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise BudgetError(
            f"{key} is the interpolation {value}, which only omegaconf can resolve: install it "
            "(pip install 'ctxguard-sdk[verl]'), or write the number",
            field=key,
            value=value,
        ) from error
    return OmegaConf.create(dict(tree), flags={"allow_objects": True})


def _select(tree: Mapping[str, Any], key: str) -> object:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(tree, key)  # type: ignore[arg-type]  # a DictConfig is a Mapping
    except OmegaConfBaseException as error:
        raise BudgetError(
            f"{key} cannot be resolved ({str(error).splitlines()[0]}): write the number, or pass the "
            "composed configuration",
            field=key,
            value=None,
        ) from error


def _load(file: Path) -> Mapping[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BudgetError(
            f"the verl configuration {file} cannot be read ({error}): pass the path of a YAML file, or a "
            "mapping",
            field="config",
            value=str(file),
        ) from error
    try:
        import yaml
    except ImportError as error:
        raise BudgetError(
            f"reading {file} needs PyYAML: install it (pip install 'ctxguard-sdk[verl]'), or pass a mapping",
            field="config",
            value=str(file),
        ) from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BudgetError(f"{file} is not valid YAML: {error}", field="config", value=str(file)) from error
    if not isinstance(tree, Mapping):
        raise BudgetError(
            f"{file} holds a {type(tree).__name__}, but a verl configuration is a mapping with sections such "
            "as data",
            field="config",
            value=str(file),
        )
    return tree
