"""Write docs/reference.md from the docstrings of the package: ``python docs/make_reference.py``."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import ctxguard
from ctxguard import events, testing

TARGET = Path(__file__).parent / "reference.md"
WIDTH = 100

ORDER = ("client", "outcome", "scope", "budget", "tokens", "compaction", "manager", "messages", "errors")
"""Parts of the package in the order in which a reader needs them; parts not named here come last."""

USED = (
    "ctxguard.client.openai:OpenAIContextOverflowError",
    "ctxguard.client.openai:UnguardedEndpointWarning",
    "ctxguard.compaction:CompactionContext",
    "ctxguard.manager:Limits",
    "ctxguard.manager:StrategyStep",
    "ctxguard.scope:CallCounts",
    "ctxguard.tokens:ApproximateCountWarning",
)
"""Types that a user meets without importing them from ``ctxguard``."""

INTERNAL = {
    "Guard.learn",
    "Guard.learn_prompt_limit",
    "Guard.scope_for",
    "HistoryManager.fit_flow",
    "HistoryManager.limits",
    "RolloutScope.begin_call",
    "RolloutScope.latch",
    "RolloutScope.record",
}
"""What the parts of the package say to each other; no user calls it."""

HEAD = """\
# Reference

<!-- Written by docs/make_reference.py from the docstrings. Change those, then run it again. -->

Everything under `ctxguard` and `ctxguard.testing` is public. Modules that are named with a longer path may
move before 1.0.
"""

PACKAGE = """\
- `__version__`: version of the package.
- `__distribution__`: its name on the package index. Another project there is called ctxguard.
"""

_SECTIONS = {"Args", "Attributes", "Returns", "Raises", "Example"}
_ENTRY = re.compile(r"([A-Za-z_][\w.*]*(?:, [A-Za-z_][\w.*]*)*): (.*)")


def reference() -> str:
    """The whole page."""
    names = [name for name in ctxguard.__all__ if not name.startswith("__")]
    groups: dict[str, list[tuple[str, Any]]] = {part: [] for part in ORDER}
    for name in names:
        thing = getattr(ctxguard, name)
        groups.setdefault(thing.__module__.split(".")[1], []).append((name, thing))
    blocks = [HEAD]
    for part, members in groups.items():
        if members:
            blocks.append(f"## ctxguard: {part}")
            blocks += [_entry(name, thing) for name, thing in members]
    blocks.append("## ctxguard: about the package")
    blocks.append("- `__version__`: version of the package.")
    blocks.append(
        "- `__distribution__`: its name on the package index. Another project there is called ctxguard."
    )
    blocks.append("## ctxguard.events")
    blocks.append(_markdown(inspect.getdoc(events) or ""))
    kinds = [events.Event, *sorted(events.Event.__subclasses__(), key=lambda kind: kind.__name__)]
    blocks += [_entry(kind.__name__, kind) for kind in kinds]
    blocks.append("## ctxguard.testing")
    blocks += [_entry(name, getattr(testing, name)) for name in testing.__all__]
    blocks.append("## Types that these use")
    for path in USED:
        module, _, name = path.partition(":")
        blocks.append(_entry(name, getattr(importlib.import_module(module), name), module))
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _entry(name: str, thing: Any, module: str = "") -> str:
    """One name: heading, signature, docstring, members."""
    blocks = [f"### {name}"]
    if not isinstance(thing, type):
        if callable(thing):
            blocks.append(_code(name + _signature(thing)))
        blocks.append(_markdown(inspect.getdoc(thing) or ""))
        return "\n\n".join(blocks)
    bases = [base.__name__ for base in thing.__bases__ if base.__name__ not in ("object", "Protocol")]
    heading = f"class {name}" + (f"({', '.join(bases)})" if bases else "")
    blocks.append(
        _code("\n".join(filter(None, [f"# {module}" if module else "", heading, _constructor(thing)])))
    )
    own = thing.__dict__.get("__doc__") or ""
    if dataclasses.is_dataclass(thing) and own.startswith(f"{name}("):
        own = ""  # made by dataclasses, it only repeats the signature
    blocks.append(_markdown(inspect.cleandoc(own)))
    attributes = list(_attributes(thing))
    if attributes:
        blocks.append("**Fields**\n\n" + "\n".join(attributes))
    blocks += list(_methods(thing))
    return "\n\n".join(filter(None, blocks))


def _constructor(thing: type) -> str:
    """How to make one, or nothing where users do not."""
    if issubclass(thing, BaseModel):
        fields = [
            f"{name}: {inspect.formatannotation(field.annotation)}"
            + ("" if field.is_required() else f" = {field.default!r}")
            for name, field in thing.model_fields.items()
        ]
        return _call(thing.__name__, ["*", *fields])
    if issubclass(thing, BaseException | enum.Enum) or getattr(thing, "_is_protocol", False):
        return ""
    if "__init__" not in thing.__dict__:
        return ""
    return thing.__name__ + _signature(thing.__init__, skip_first=True, name=thing.__name__)


def _attributes(thing: type) -> Iterator[str]:
    """Lines for fields and enum members that have a docstring of their own below them."""
    texts = _docstrings_below(thing)
    if issubclass(thing, BaseModel):
        for name, field in thing.model_fields.items():
            yield f"- `{name}`: {_inline(field.description or '')}"
        return
    for name, text in texts.items():
        if name.startswith("_"):
            continue
        value = thing.__dict__.get(name)
        shown = f" (`{value.value!r}`)" if isinstance(value, enum.Enum) else ""
        yield f"- `{name}`{shown}: {_inline(text)}"


def _docstrings_below(thing: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for line, following in itertools.pairwise(body):
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if not isinstance(target, ast.Name) or not isinstance(following, ast.Expr):
            continue
        if isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
            found[target.id] = inspect.cleandoc(following.value.value)
    return found


def _methods(thing: type) -> Iterator[str]:
    for name, member in thing.__dict__.items():
        path = f"{thing.__name__}.{name}"
        if name.startswith("_") or path in INTERNAL:
            continue
        function = (
            getattr(member, "__func__", None)
            or getattr(member, "fget", None)
            or getattr(member, "func", member)
        )
        if not inspect.isfunction(function) or not function.__doc__:
            continue
        is_method = inspect.isfunction(member) or isinstance(member, classmethod)
        heading = (
            name + _signature(function, skip_first=True, name=name) if is_method else f"{name}  # property"
        )
        yield f"#### {path}\n\n{_code(heading)}\n\n{_markdown(inspect.cleandoc(function.__doc__))}"


def _signature(function: Any, *, skip_first: bool = False, name: str = "") -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if skip_first else 0 :]
    shown: list[str] = []
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = stars + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_default(parameter.default)}"
        shown.append(text)
    back = signature.return_annotation
    arrow = "" if back in (signature.empty, None, "None") else f" -> {_annotation(back)}"
    return _call("", shown, arrow, len(name or getattr(function, "__name__", "")))


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    text = repr(value)
    if " at 0x" in text:
        return "…"
    return text if len(text) <= 60 else f"{text[:40]}…"


def _call(name: str, parameters: list[str], arrow: str = "", indent: int = 0) -> str:
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) + indent <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){arrow}"


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _inline(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _markdown(doc: str) -> str:
    """A docstring as Markdown: its sections become lists, its examples sessions."""
    blocks: list[str] = []
    plain: list[str] = []
    lines = doc.splitlines()
    at = 0
    while at < len(lines):
        head, _, rest = lines[at].partition(":")
        if head in _SECTIONS and not rest:
            end = at + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            blocks += [
                "\n".join(plain).strip(),
                *_section(head, textwrap.dedent("\n".join(lines[at + 1 : end]))),
            ]
            plain, at = [], end
        else:
            plain.append(lines[at].replace("``", "`"))
            at += 1
    blocks.append("\n".join(plain).strip())
    return "\n\n".join(filter(None, blocks))


def _section(title: str, body: str) -> Iterator[str]:
    if title == "Example":
        yield "**Example**"
        yield f"```pycon\n{body.strip()}\n```"
        return
    names = {"Args": "Arguments"}
    yield f"**{names.get(title, title)}**"
    entries: list[str] = []
    for line in body.strip().splitlines():
        match = _ENTRY.match(line)
        if match and not line.startswith(" "):
            entries.append(f"- `{match[1]}`: {match[2]}")
        elif entries:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line.strip())
    yield "\n".join(entry.replace("``", "`").rstrip() for entry in entries)


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
