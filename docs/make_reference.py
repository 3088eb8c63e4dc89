"""Write docs/reference.md from the docstrings of the package: ``python docs/make_reference.py``.

The page is the same whatever is installed: integrations that import their framework are read as text.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator
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

INTEGRATIONS = {
    "agentlightning": (
        "use_guard",
        "default_guard",
        "guarded_client",
        "guarded_async_client",
        "request_defaults",
        "mark_failures",
        "hooks:FailureMarkHook",
        "v0_client:MarkingClient",
        "record_sent",
    ),
    "agentlightning.verl": ("GuardedDaemon", "GuardedTrainer", "PER_ROLLOUT"),
    "agentlightning.filter": ("FailedRolloutFilter",),
    "agentlightning.collecting": ("CollectsResults",),
    "agentlightning.steps": ("SkipsThinSteps",),
    "agentlightning.legacy": ("LegacyDaemon", "LegacyTrainer", "PER_ROLLOUT", "run_ppo", "main"),
    "agentlightning_v1": ("guarded_run", "guarded_client", "Gateway"),
    "agentlightning_v1.hooks": ("FailedRolloutHooks",),
    "agentlightning_v1.entrypoint": ("run_ppo",),
    "agentlightning_v1.trainer": ("GuardedTrainer",),
    "agentlightning_v1.settings": ("GuardSettings",),
    "qwen_agent": ("llm_config", "GuardedChatAtOAI", "GuardedVLChatAtOAI", "GuardedChatAtAzure"),
    "accounting": ("FailureHandling",),
    "trajectories": ("split_into_segments", "extends"),
}
"""Modules below ``ctxguard.integrations`` and what users take from them; ``module:name`` stands in a module
below that one."""

READ_AS_TEXT = {
    "agentlightning.hooks",
    "agentlightning.legacy",
    "agentlightning.v0_client",
    "agentlightning.verl",
    "agentlightning_v1.entrypoint",
    "agentlightning_v1.hooks",
    "agentlightning_v1.trainer",
    "qwen_agent",
}
"""Those that import Agent Lightning, verl or Qwen-Agent."""

INTERNAL = {
    "CollectsResults.clear_data_and_server",
    "CollectsResults.set_up_data_and_server",
    "Guard.learn",
    "Guard.learn_prompt_limit",
    "Guard.scope_for",
    "Guard.takes_return_token_ids",
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

Everything under `ctxguard` and `ctxguard.testing` is public, and so is what stands here of
`ctxguard.integrations`. Other modules that are named with a longer path may move before 1.0.
"""

PACKAGE = """\
- `__version__`: version of the package.
- `__distribution__`: its name on the package index. Another project there is called ctxguard.
"""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
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
    for place, members in INTEGRATIONS.items():
        blocks += _integration(place, members)
    blocks.append("## Types that these use")
    for path in USED:
        module, _, name = path.partition(":")
        blocks.append(_entry(name, getattr(importlib.import_module(module), name), module))
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _integration(place: str, members: Iterable[str]) -> Iterator[str]:
    """A module below ``ctxguard.integrations``: what it is for, in a sentence, and its names."""
    yield f"## ctxguard.integrations.{place}"
    yield _markdown((ast.get_docstring(_tree(place)) or "").split("\n\n")[0])
    for member in members:
        below, _, name = member.rpartition(":")
        module = f"{place}.{below}" if below else place
        if module in READ_AS_TEXT:
            yield _entry_from_source(name, _tree(module))
        else:
            found = importlib.import_module(f"ctxguard.integrations.{module}")
            yield _entry(name, getattr(found, name))


def _tree(module: str) -> ast.Module:
    file = Path(ctxguard.__file__).parent / "integrations" / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _entry(name: str, thing: Any, module: str = "") -> str:
    """One name: heading, signature, docstring, members."""
    if not isinstance(thing, type):
        heading = name + _signature(inspect.signature(thing), name) if callable(thing) else ""
        return _plain_entry(name, heading, inspect.getdoc(thing) or "")
    own = thing.__dict__.get("__doc__") or ""
    if dataclasses.is_dataclass(thing) and own.startswith(f"{name}("):
        own = ""  # made by dataclasses, it only repeats the signature
    return _class_entry(
        name,
        bases=[base.__name__ for base in thing.__bases__],
        constructor=_constructor(thing),
        doc=inspect.cleandoc(own),
        attributes=_attributes(thing),
        methods=_methods(thing),
        module=module,
    )


def _entry_from_source(name: str, tree: ast.Module) -> str:
    """The same of a class, a function or a constant that is read, not imported."""
    node = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(node, ast.ClassDef):
        functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        made = [part for part in functions if part.name == "__init__"]
        return _class_entry(
            name,
            bases=[ast.unparse(base) for base in node.bases],
            constructor=_made_with(name, _signature_in(made[0])) if made else "",
            doc=ast.get_docstring(node) or "",
            attributes=_fields(node),
            methods=_methods_in(name, functions),
        )
    if isinstance(node, ast.FunctionDef):
        heading = name + _signature(_signature_in(node), name)
        return _plain_entry(name, heading, ast.get_docstring(node) or "")
    return _plain_entry(name, "", _docstrings_below(tree)[name])


def _plain_entry(name: str, heading: str, doc: str) -> str:
    return "\n\n".join(filter(None, [f"### {name}", heading and _code(heading), _markdown(doc)]))


def _class_entry(
    name: str,
    *,
    bases: Iterable[str],
    constructor: str,
    doc: str,
    attributes: Iterable[str],
    methods: Iterable[str],
    module: str = "",
) -> str:
    shown = [base for base in bases if base not in ("object", "Protocol") and not base.startswith("_")]
    heading = f"class {name}" + (f"({', '.join(shown)})" if shown else "")
    code = _code("\n".join(filter(None, [f"# {module}" if module else "", heading, constructor])))
    lines = "\n".join(attributes)
    fields = f"**Fields**\n\n{lines}" if lines else ""
    return "\n\n".join(filter(None, [f"### {name}", code, _markdown(doc), fields, *methods]))


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
    return _made_with(thing.__name__, inspect.signature(thing.__init__))


def _made_with(name: str, signature: inspect.Signature) -> str:
    """The call that makes one; nothing where arguments are only passed on to a base class."""
    shown = _signature(signature, name, skip_first=True)
    return "" if shown == "(*args: Any, **kwargs: Any)" else name + shown


def _attributes(thing: type) -> Iterator[str]:
    """Lines for fields and enum members that have a docstring of their own below them."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError):
        return
    if issubclass(thing, enum.Enum):
        for name, text in _docstrings_below(node).items():
            yield f"- `{name}` (`{thing[name].value!r}`): {_inline(text)}"
    elif isinstance(node, ast.ClassDef):
        yield from _fields(node)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Lines for attributes in the body of a class; with type and default where no constructor shows them."""
    values = {
        line.target.id: f": {ast.unparse(line.annotation)} = {ast.unparse(line.value)}"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value
    }
    if node.decorator_list or "BaseModel" in [ast.unparse(base) for base in node.bases]:
        values = {}
    for name, text in _docstrings_below(node).items():
        if not name.startswith("_"):
            yield f"- `{name}{values.get(name, '')}`: {_inline(text)}"


def _docstrings_below(node: ast.AST) -> dict[str, str]:
    """Name → docstring below it, of the assignments in a body."""
    found = {}
    for line, following in itertools.pairwise(getattr(node, "body", ())):
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if not isinstance(target, ast.Name) or not isinstance(following, ast.Expr):
            continue
        if isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
            found[target.id] = inspect.cleandoc(following.value.value)
    return found


def _methods(thing: type) -> Iterator[str]:
    for name, member in thing.__dict__.items():
        function = (
            getattr(member, "__func__", None)
            or getattr(member, "fget", None)
            or getattr(member, "func", member)
        )
        if not inspect.isfunction(function) or not function.__doc__:
            continue
        is_method = inspect.isfunction(member) or isinstance(member, classmethod)
        signature = inspect.signature(function) if is_method else None
        yield _method(thing.__name__, name, signature, inspect.cleandoc(function.__doc__))


def _methods_in(class_name: str, functions: Iterable[_Function]) -> Iterator[str]:
    for function in functions:
        doc = ast.get_docstring(function)
        if not doc:
            continue
        is_property = "property" in [ast.unparse(decorator) for decorator in function.decorator_list]
        yield _method(class_name, function.name, None if is_property else _signature_in(function), doc)


def _method(class_name: str, name: str, signature: inspect.Signature | None, doc: str) -> str:
    """A method, or with no signature a property; nothing where users have no use for it."""
    path = f"{class_name}.{name}"
    if name.startswith("_") or path in INTERNAL:
        return ""
    heading = (
        f"{name}  # property" if signature is None else name + _signature(signature, name, skip_first=True)
    )
    return f"#### {path}\n\n{_code(heading)}\n\n{_markdown(doc)}"


class _Source(str):
    """A default as it is written."""

    __repr__ = str.__str__


def _signature_in(function: _Function) -> inspect.Signature:
    """The signature that a function has in the source."""

    def parameter(argument: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        annotation = ast.unparse(argument.annotation) if argument.annotation else inspect.Parameter.empty
        written = inspect.Parameter.empty if default is None else _Source(ast.unparse(default))
        return inspect.Parameter(argument.arg, kind, default=written, annotation=annotation)

    kinds, arguments = inspect.Parameter, function.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    parameters = [
        parameter(argument, kinds.POSITIONAL_OR_KEYWORD, default)
        for argument, default in zip(arguments.args, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(parameter(arguments.vararg, kinds.VAR_POSITIONAL))
    parameters += [
        parameter(argument, kinds.KEYWORD_ONLY, default)
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(parameter(arguments.kwarg, kinds.VAR_KEYWORD))
    back = ast.unparse(function.returns) if function.returns else inspect.Signature.empty
    return inspect.Signature(parameters, return_annotation=back)


def _signature(signature: inspect.Signature, name: str, *, skip_first: bool = False) -> str:
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
    return _call("", shown, arrow, len(name))


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    if isinstance(value, type):
        return value.__qualname__
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
            plain.append(re.sub("::$", ":", lines[at]).replace("``", "`"))
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
