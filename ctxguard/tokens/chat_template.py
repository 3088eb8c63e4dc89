"""The exact counter: renders with the served model's own chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

from ctxguard.errors import CounterError, TemplateRefusedError
from ctxguard.tokens import llama_cpp
from ctxguard.tokens.base import Message, Tool
from ctxguard.tokens.jinja_template import ChatTemplate, hf_tojson
from ctxguard.tokens.media import IMAGE_TOKENS, media_tokens
from ctxguard.tokens.model_folder import ModelFiles, named_templates, read_model_folder, read_text
from ctxguard.tokens.normalize import normalize_messages, normalize_tools
from ctxguard.tokens.segments import EncodeCounter, SegmentCounter, TextTokenizer
from ctxguard.tokens.truncate import truncate_text

Dialect = Literal["vllm", "llama.cpp"]
"""Whose handling of messages, tools and text is followed before and after the template."""

# Counters of one tokenizer share it, and with it the counts of known segments, while one of them lives.
_loaded: WeakValueDictionary[str, SegmentCounter] = WeakValueDictionary()
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_NOT_VARIABLES = frozenset({"messages", "tools", "tokenize", "return_dict", "chat_template"})


class ChatTemplateCounter:
    """Counts prompts as the server does: same normalisation, same template, same tokenizer.

    Make one with `from_folder`, `from_tokenizer` or `from_files`.

    Args:
        text_counter: counts and tokenizes rendered text.
        templates: chat templates by name. With several, ``tool_use`` serves requests with tools and
            ``default`` all others, as in transformers.
        special_tokens: template variables such as ``bos_token``.
        tokenizer_digest: tells tokenizers apart, for the fingerprint.
        template_kwargs: defaults of the server (``--default-chat-template-kwargs``); a request's own win.
        dialect: ``"vllm"`` (SGLang and others are close to it) or ``"llama.cpp"``.
        name: what to call the model in reports.
        image_tokens: what one image counts, at most; with media a count is an estimate whatever ``exact``
            says (see `has_media`).

    Attributes:
        exact: True; margin: 0.0.

    Raises:
        CounterError: no chat template, or one that is not valid jinja; an unknown dialect.
    """

    exact = True
    margin = 0.0

    def __init__(
        self,
        text_counter: TextTokenizer,
        templates: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        tokenizer_digest: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
        dialect: Dialect = "vllm",
        name: str = "model",
        image_tokens: int = IMAGE_TOKENS,
    ) -> None:
        _check_dialect(dialect)
        _check_templates(templates, name)
        self.name = f"chat-template({name})"
        self.dialect = dialect
        self._text = text_counter
        self._tojson = llama_cpp.tojson if dialect == "llama.cpp" else hf_tojson
        self._templates = {
            key: ChatTemplate(source, tojson=self._tojson) for key, source in templates.items()
        }
        self._special_tokens = dict(special_tokens or {})
        self._defaults = dict(template_kwargs or {})
        self._image_tokens = image_tokens
        self.fingerprint = _digest(
            tokenizer_digest, templates, self._special_tokens, self._defaults, dialect, image_tokens
        )

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, template: str | Path | None = None, **options: Any
    ) -> ChatTemplateCounter:
        """From a downloaded model: ``tokenizer.json`` and its chat template (see `read_model_folder`).

        Args:
            folder: the model's folder.
            template: text or path of another template, as given to ``vllm serve --chat-template``.
            options: ``template_kwargs``, ``dialect``, ``name``, ``image_tokens``.

        Raises:
            CounterError: something is missing; the message names it and the remedy.
        """
        options.setdefault("name", Path(folder).resolve().name)
        return cls._from_files(read_model_folder(folder), template, options)

    @classmethod
    def from_files(
        cls, tokenizer_json: str | Path, template: str | Path, **options: Any
    ) -> ChatTemplateCounter:
        """From the path of a ``tokenizer.json`` and the text or path of a template.

        Args:
            tokenizer_json: path of the file.
            template: the jinja text, or the path of a file that holds it.
            options: ``template_kwargs``, ``dialect``, ``name``, ``image_tokens``, ``special_tokens``.

        Raises:
            CounterError: a file cannot be read, or is not what it should be.
        """
        path = Path(tokenizer_json)
        options.setdefault("name", path.resolve().parent.name or path.name)
        files = ModelFiles(read_text(path), {}, options.pop("special_tokens", None) or {})
        return cls._from_files(files, template, options)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, template: str | Path | None = None, **options: Any
    ) -> ChatTemplateCounter:
        """From a transformers tokenizer object, fast or slow; later changes to it do not matter.

        Raises:
            CounterError: the object is no tokenizer, or has no chat template.
        """
        templates = named_templates(getattr(tokenizer, "chat_template", None))
        special = {
            key: str(value) for key, value in dict(getattr(tokenizer, "special_tokens_map", {})).items()
        }
        options.setdefault("name", str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        to_str = getattr(backend, "to_str", None) or getattr(tokenizer, "to_str", None)
        if callable(to_str) and not getattr(tokenizer, "split_special_tokens", False):
            return cls._from_files(ModelFiles(to_str(), templates, special), template, options)
        encode = getattr(tokenizer, "encode", None)
        if not callable(encode):
            raise CounterError(
                f"{type(tokenizer).__name__} is not a tokenizer: pass a transformers tokenizer, "
                "a model folder or the path of a tokenizer.json"
            )
        if options.get("dialect") == "llama.cpp":
            raise CounterError(
                f"{type(tokenizer).__name__} has no tokenizer.json, which dialect 'llama.cpp' needs"
            )
        if template is not None:
            templates = {"default": _template_text(template)}
        vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
        return cls(
            EncodeCounter(_without_special_tokens(encode)),
            templates,
            special_tokens=special,
            tokenizer_digest=_digest(sorted(vocabulary.items()), type(tokenizer).__name__),
            **options,
        )

    @classmethod
    def _from_files(
        cls, files: ModelFiles, template: str | Path | None, options: dict[str, Any]
    ) -> ChatTemplateCounter:
        dialect = options.get("dialect", "vllm")
        _check_dialect(dialect)
        templates = files.templates if template is None else {"default": _template_text(template)}
        _check_templates(templates, options["name"])  # before the tokenizer, which takes a second to load
        digest = _digest(files.tokenizer_json, dialect)
        text_counter = _loaded.get(digest)
        if text_counter is None:
            source = files.tokenizer_json
            if dialect == "llama.cpp":
                source = llama_cpp.tokenizer_json(source)
            text_counter = _loaded[digest] = SegmentCounter(source)
        return cls(
            text_counter,
            templates,
            special_tokens=files.special_tokens,
            tokenizer_digest=digest,
            **options,
        )

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of the whole prompt; equals the server's ``usage.prompt_tokens`` for text.

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI tool schemas of the request.
            template_kwargs: what reaches the template besides, see `request_template_kwargs`.

        Raises:
            TemplateRefusedError: the template, or the server before it, refuses these messages.
        """
        prompt = self.render(messages, tools=tools, template_kwargs=template_kwargs)
        return self._text.count(prompt) + media_tokens(messages, self._image_tokens)

    def ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        """Token ids of the whole prompt, as the server makes them. Arguments and errors as in `count`.

        The prompt is tokenized in full: some 15 ms for 30,000 tokens, where `count` knows most of it already.
        """
        return self._text.ids(self.render(messages, tools=tools, template_kwargs=template_kwargs))

    def count_text(self, text: str) -> int:
        """Tokens of a bare text, outside any template. Never raises on any ``str``."""
        return self._text.count(text)

    def truncate(self, text: str, max_tokens: int, *, marker: str = "\n…\n") -> str:
        """Head and tail of ``text`` around ``marker``, at most ``max_tokens`` tokens; see `truncate_text`."""
        return truncate_text(text, max_tokens, self._text, marker=marker)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text, as the server tokenises it. Arguments and errors as in `count`."""
        request = {key: value for key, value in (template_kwargs or {}).items() if not _is_unset(value)}
        options = {**self._defaults, **request}
        generate = bool(options.pop("add_generation_prompt", True))
        continues = options.pop("continue_final_message", False)
        variables = {**self._special_tokens, **{k: v for k, v in options.items() if k not in _NOT_VARIABLES}}
        if self.dialect == "llama.cpp":
            return self._render_llama_cpp(messages, tools, generate, variables)
        if not messages:
            raise _refused("Cannot apply chat template to an empty conversation.")
        schemas = normalize_tools(tools)
        template = self._template(options.get("chat_template"), schemas is not None)
        normalized = normalize_messages(
            messages, content_format=template.content_format, knows_developer=template.knows_developer
        )
        if not continues:
            return template.render(normalized, schemas, add_generation_prompt=generate, variables=variables)
        if generate:
            raise _refused("continue_final_message and add_generation_prompt are not compatible.")
        field = continues if isinstance(continues, str) else "content"
        marked, final = _with_continue_tag(normalized, field)
        prompt = template.render(marked, schemas, add_generation_prompt=False, variables=variables)
        return _up_to_continue_tag(prompt, final)

    def _render_llama_cpp(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        generate: bool,
        variables: Mapping[str, Any],
    ) -> str:
        schemas = llama_cpp.normalize_tools_llama_cpp(tools)
        template = self._template(None, schemas is not None)
        normalized = llama_cpp.normalize_messages_llama_cpp(
            messages, content_format=template.content_format, knows_developer=template.knows_developer
        )

        def render(some: Sequence[Any], add_generation_prompt: bool) -> str:
            return template.render(
                some, schemas, add_generation_prompt=add_generation_prompt, variables=variables
            )

        if normalized and normalized[-1]["role"] == "assistant":
            return llama_cpp.render_prefill(normalized, messages[-1], render)
        return render(normalized, generate)

    def _template(self, asked: Any, has_tools: bool) -> ChatTemplate:
        """The template for this request, chosen as ``transformers`` chooses among named ones."""
        if isinstance(asked, str):
            return self._templates.get(asked) or ChatTemplate(asked, tojson=self._tojson)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise CounterError(
            f"{self.name} has the chat templates {', '.join(sorted(self._templates))} and none called "
            "'default': pass template=…, the text or path of the one that the server uses"
        )


def _with_continue_tag(messages: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with a tag after the text to be continued, and that text (as transformers does)."""
    last = dict(messages[-1])
    value = last.get(field)
    if isinstance(value, str):
        last[field], final = value + _CONTINUE_TAG, value
    elif isinstance(value, list):
        at = next((i for i in range(len(value) - 1, -1, -1) if "text" in value[i]), None)
        if at is None:
            raise _refused("continue_final_message is set but the final message has no text to continue.")
        final = value[at]["text"]
        last[field] = [*value[:at], {**value[at], "text": final + _CONTINUE_TAG}, *value[at + 1 :]]
    else:
        raise _refused(f'continue_final_message is set but the final message has no "{field}" to continue.')
    return [*messages[:-1], last], final


def _up_to_continue_tag(prompt: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in prompt or tag not in prompt:
        raise _refused(
            "continue_final_message is set but the final message does not appear in the rendered chat."
        )
    at = prompt.rindex(tag)
    if prompt.startswith(_CONTINUE_TAG, at):
        return prompt[:at]
    return prompt[:at].rstrip()  # the template strips messages


def _is_unset(value: Any) -> bool:
    """vLLM takes None and ``"auto"`` in a request for not given (``renderers/params.py``)."""
    return value is None or value == "auto"


def _template_text(template: str | Path) -> str:
    """The template itself: of a path its file's content, of a text that text."""
    if isinstance(template, Path) or ("{" not in template and "\n" not in template):
        return read_text(template)
    return template


def _without_special_tokens(encode: Callable[..., Sequence[int]]) -> Callable[[str], Sequence[int]]:
    return lambda text: encode(text, add_special_tokens=False)


def _check_dialect(dialect: str) -> None:
    if dialect not in get_args(Dialect):
        raise CounterError(
            f"unknown dialect {dialect!r}; known are {', '.join(map(repr, get_args(Dialect)))}"
        )


def _check_templates(templates: Mapping[str, str], name: str) -> None:
    if not templates:
        raise CounterError(
            f"{name!r} has no chat template: pass template=…, the text or the path of the .jinja file "
            "that the server was started with"
        )


def _refused(message: str) -> TemplateRefusedError:
    return TemplateRefusedError(f"the server refuses these messages: {message}", template_message=message)


def _digest(*parts: Any) -> str:
    hashed = blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Mapping):
            part = sorted(part.items(), key=str)
        hashed.update((part if isinstance(part, str) else repr(part)).encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.hexdigest()
