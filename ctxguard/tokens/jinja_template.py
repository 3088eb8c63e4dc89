"""A chat template, compiled once, rendered as transformers renders it. The only module that needs jinja2."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ctxguard.errors import CounterError, TemplateRefusedError
from ctxguard.tokens.normalize import ContentFormat

INSTALL = 'pip install "ctxguard-sdk[templates]"'

ToJson = Callable[..., str]


def hf_tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The ``tojson`` filter of transformers: plain JSON, where jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """One compiled chat template.

    Args:
        source: the jinja text.
        tojson: the ``tojson`` filter; servers differ in how they write numbers.

    Attributes:
        source: the jinja text.
        content_format: ``"openai"`` for a template that iterates over content parts, else ``"string"``.
        knows_developer: whether the template mentions the role ``developer``.

    Raises:
        CounterError: jinja2 is missing, or the template is not valid jinja.
    """

    def __init__(self, source: str, *, tojson: ToJson = hf_tojson) -> None:
        self.source = source
        self.knows_developer = "'developer'" in source or '"developer"' in source  # vLLM's own test
        self._template, self.content_format = _compile(source, tojson)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt.

        Raises:
            TemplateRefusedError: the template raised.
        """
        context = {"documents": None, **variables}
        context.update(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            return str(self._template.render(context))
        except Exception as error:  # a template is a program: whatever it raises, the server answers 400
            raise TemplateRefusedError(
                f"the chat template refuses these messages: {error}; the server would answer 400",
                template_message=str(error),
            ) from error


@functools.lru_cache(maxsize=64)
def _compile(source: str, tojson: ToJson) -> tuple[Any, ContentFormat]:
    """The settings are those of ``transformers.utils.chat_template_utils._compile_jinja_template``."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise CounterError(
            f"counting with a chat template needs jinja2, which is not installed: {INSTALL}"
        ) from error

    class Generation(jinja2.ext.Extension):
        """``{% generation %}``, which training templates put around answers; it renders its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja's own protocol

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Callable[[], str]) -> str:
            return caller()

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, with its verdicts remembered: they depend on the object's type and the name alone."""

        verdicts: dict[tuple[type, str], bool] = {}  # noqa: RUF012 - shared on purpose

        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            key = (type(obj), attr)
            verdict = self.verdicts.get(key)
            if verdict is None:
                if len(self.verdicts) > 4_096:
                    self.verdicts.clear()
                verdict = self.verdicts[key] = super().is_safe_attribute(obj, attr, value)
            return verdict

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source), _content_format(environment.parse(source))
    except jinja2.TemplateError as error:
        raise CounterError(
            f"the chat template is not valid jinja: {error}; it starts with {source[:60]!r}. "
            "Pass the template's text, or the path of a file that holds it"
        ) from error


def _content_format(tree: Any) -> ContentFormat:
    """How the template takes contents, found as vLLM does (``renderers/hf.py``, Apache-2.0).

    ``"openai"`` when it loops over ``message.content`` (directly, through a variable called ``content``, or
    in a macro that is passed it), where ``message`` is the variable of a loop over ``messages``.
    """
    from jinja2 import nodes

    def reads(node: Any, name: str, key: str | None = None) -> bool:
        """Whether ``node`` is ``name``, or ``name[key]``, maybe filtered, tested or sliced."""
        if isinstance(node, nodes.Filter | nodes.Test):
            return node.node is not None and reads(node.node, name, key)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return reads(node.node, name, key)
        if key is None:
            return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
        if isinstance(node, nodes.Getitem):
            return (
                reads_plain(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
            )
        return isinstance(node, nodes.Getattr) and reads_plain(node.node, name) and node.attr == key

    def reads_plain(node: Any, name: str) -> bool:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name

    def aliases(name: str) -> Iterator[str]:
        yield name
        pending = [name]
        seen = {name}
        while pending:
            current = pending.pop(0)
            for assign in tree.find_all(nodes.Assign):
                if isinstance(assign.target, nodes.Name) and reads(assign.node, current):
                    yield assign.target.name
                    if assign.target.name not in seen:
                        seen.add(assign.target.name)
                        pending.append(assign.target.name)

    lists = set(aliases("messages"))
    loops = list(tree.find_all(nodes.For))
    messages = {
        loop.target.name
        for loop in loops
        if isinstance(loop.target, nodes.Name) and any(reads(loop.iter, name) for name in lists)
    }

    def is_content(node: Any) -> bool:
        return any(reads(node, message, "content") for message in messages)

    in_macros: set[int] = set()
    passed: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given.update(name for name, value in zip(names, call.args, strict=False) if is_content(value))
                given.update(k.key for k in call.kwargs if k.key in names and is_content(k.value))
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            passed[id(loop)] = given
    for loop in loops:
        plain = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if is_content(loop.iter) or (plain is not None and plain in passed.get(id(loop), ())):
            return "openai"
        if plain == "content" and id(loop) not in in_macros:
            return "openai"
    return "string"
