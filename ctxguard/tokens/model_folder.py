"""Reading what a model folder says about its tokenizer and chat template, without transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxguard.errors import CounterError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFiles:
    """What a chat prompt of a model depends on.

    Attributes:
        tokenizer_json: text of ``tokenizer.json``.
        templates: chat templates by name; a model with one calls it ``"default"``.
        special_tokens: variables that templates use, e.g. ``{"bos_token": "<s>"}``.
    """

    tokenizer_json: str
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, str] = field(default_factory=dict)


def read_model_folder(folder: str | Path) -> ModelFiles:
    """Read a folder as ``transformers.AutoTokenizer.from_pretrained`` would.

    The template comes from ``chat_template.jinja`` (others by name from ``additional_chat_templates/``), else
    from ``chat_template`` in ``tokenizer_config.json``, else from ``chat_template.json``.

    Raises:
        CounterError: no such folder, no ``tokenizer.json`` in it, or a file that is not JSON.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CounterError(
            f"no model folder at {str(folder)!r}: pass the path of a downloaded model "
            "(a folder with tokenizer.json), not its name on a hub"
        )
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CounterError(
            f"{str(folder)!r} holds no tokenizer.json: load it with transformers.AutoTokenizer and pass that "
            "object, or save_pretrained() it there first"
        )
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(_read_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    return ModelFiles(read_text(path), _templates(folder, config), special)


def named_templates(value: Any) -> dict[str, str]:
    """Chat templates by name, from any form that transformers allows: a text, a dict, or a list."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return {str(name): text for name, text in value.items() if isinstance(text, str)}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
    return {}


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        CounterError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CounterError(f"cannot read {str(path)!r}: {error}") from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    main = folder / "chat_template.jinja"
    more = {
        path.stem: read_text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if main.is_file():
        return {"default": read_text(main), **more}
    found = named_templates(config.get("chat_template"))
    return {
        **(found or named_templates(_read_json(folder / "chat_template.json").get("chat_template"))),
        **more,
    }


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):  # an absent one must stay undefined: None would be rendered as "None"
            found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise CounterError(f"{str(path)!r} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
