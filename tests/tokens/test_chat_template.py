"""Exact counts: equal to ``apply_chat_template(tokenize=True)`` on what vLLM hands to it."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctxguard.errors import CounterError, TemplateRefusedError
from ctxguard.tokens import ChatTemplateCounter, TokenCounter, normalize_messages, normalize_tools
from tests.doubles import assistant, call, result, system, user
from tests.message_lists import LISTS, REASONING, TOOLS, MessageList

DIRTY = ["", " ", "\n\n", "plain words", "日本語と中文", "e\u0301a\u0300 Å", "<|im_end|>", "<think>\nhm\n</think>\n\n",
         "👩‍💻🚀", "</tool_response>", "<tool_call>", "x" * 50, "\r\n\t ", "<|endoftext|>", "1234567"]  # fmt: skip
texts = st.lists(st.sampled_from(DIRTY) | st.text(max_size=12), max_size=4).map("".join)
contents = st.none() | texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
arguments = st.dictionaries(
    texts, texts | st.integers() | st.floats(allow_nan=False) | st.none(), max_size=3
).map(json.dumps) | st.sampled_from(["", "{}", "[1]", "{bad"])
turns = st.one_of(
    contents.map(user),
    st.builds(
        lambda content, reasoning: assistant(content=content, reasoning_content=reasoning), contents, texts
    ),
    st.builds(
        lambda content, args, results: [
            assistant(*(call(f"c{i}", "read", a) for i, a in enumerate(args)), content=content),
            *(result(f"c{i}", r) for i, (_, r) in enumerate(zip(args, results, strict=False))),
        ],
        contents,
        st.lists(arguments, min_size=1, max_size=3),
        st.lists(texts, min_size=3, max_size=3),
    ),
)


def conversation(first: list[dict[str, Any]], drawn: list[Any]) -> list[dict[str, Any]]:
    messages = list(first)
    for turn in drawn:
        messages.extend(turn if isinstance(turn, list) else [turn])
    return messages


conversations = st.builds(
    conversation, st.sampled_from([[], [system("Be brief.")]]), st.lists(turns, min_size=1, max_size=6)
)


def reference(tokenizer: Any, messages: Any, tools: Any = None, **kwargs: Any) -> int:
    kwargs.setdefault("add_generation_prompt", True)
    ids = tokenizer.apply_chat_template(
        normalize_messages(messages), tools=normalize_tools(tools), tokenize=True, return_dict=False, **kwargs
    )
    return len(ids)


@pytest.mark.parametrize("name", [*LISTS, *REASONING])
def test_equals_transformers_on(name: str, qwen: ChatTemplateCounter, hf_tokenizer: Any) -> None:
    messages, tools, kwargs = MessageList(*{**LISTS, **REASONING}[name])
    expected = reference(hf_tokenizer, messages, tools, **(kwargs or {}))
    assert qwen.count(messages, tools=tools, template_kwargs=kwargs) == expected


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations, has_tools=st.booleans(), thinking=st.sampled_from([None, True, False]))
def test_equals_transformers_on_any_conversation(
    qwen: ChatTemplateCounter, hf_tokenizer: Any, messages: Any, has_tools: bool, thinking: bool | None
) -> None:
    tools = TOOLS if has_tools else None
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    assert qwen.count(messages, tools=tools, template_kwargs=kwargs) == reference(
        hf_tokenizer, messages, tools, **kwargs
    )


def test_renders_the_text_that_is_counted(qwen: ChatTemplateCounter) -> None:
    assert qwen.render([user("hi")]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_generation_prompt_and_continuation_are_as_in_transformers(
    qwen: ChatTemplateCounter, hf_tokenizer: Any
) -> None:
    messages = [user("Count."), assistant(content="1, 2, ")]
    for kwargs in (
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        assert qwen.count(messages, template_kwargs=kwargs) == reference(hf_tokenizer, messages, **kwargs)
    with pytest.raises(TemplateRefusedError, match="not compatible"):
        qwen.count(messages, template_kwargs={"continue_final_message": True})
    with pytest.raises(TemplateRefusedError, match="no"):
        qwen.count(
            [user([])], template_kwargs={"continue_final_message": "thinking", "add_generation_prompt": False}
        )


def test_request_options_win_over_the_servers_and_unset_ones_do_not(qwen3_folder: Path) -> None:
    counter = ChatTemplateCounter.from_folder(qwen3_folder, template_kwargs={"enable_thinking": False})
    off = counter.count([user("hi")])
    assert off == counter.count([user("hi")], template_kwargs={"enable_thinking": None})
    assert off > counter.count([user("hi")], template_kwargs={"enable_thinking": True})


def test_a_request_may_bring_its_own_template(qwen: ChatTemplateCounter) -> None:
    kwargs = {"chat_template": "{{ messages[0].content }}"}
    assert qwen.render([user("hi")], template_kwargs=kwargs) == "hi"


def test_an_object_a_folder_and_files_count_alike(
    qwen: ChatTemplateCounter, qwen3_folder: Path, hf_tokenizer: Any
) -> None:
    others = [
        ChatTemplateCounter.from_tokenizer(hf_tokenizer),
        ChatTemplateCounter.from_tokenizer(hf_tokenizer, template=qwen3_folder / "chat_template.jinja"),
        ChatTemplateCounter.from_files(qwen3_folder / "tokenizer.json", qwen3_folder / "chat_template.jinja"),
    ]
    for counter in others:
        for messages, tools, kwargs in LISTS.values():
            expected = qwen.count(messages, tools=tools, template_kwargs=kwargs)
            assert counter.count(messages, tools=tools, template_kwargs=kwargs) == expected


def test_truncation_set_on_the_tokenizer_object_does_not_cut_counts(hf_tokenizer: Any) -> None:
    hf_tokenizer("some words", truncation=True, max_length=2)
    try:
        assert ChatTemplateCounter.from_tokenizer(hf_tokenizer).count_text("word " * 100) > 90
    finally:
        hf_tokenizer("some words", truncation=False)


def test_a_tokenizer_without_a_tokenizer_json_is_encoded_in_full(
    qwen: ChatTemplateCounter, hf_tokenizer: Any
) -> None:
    class Slow:
        chat_template = hf_tokenizer.chat_template
        special_tokens_map = hf_tokenizer.special_tokens_map
        name_or_path = "slow"

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return list(hf_tokenizer.encode(text, add_special_tokens=False))

    counter = ChatTemplateCounter.from_tokenizer(Slow())
    assert counter.count([user("hi")], tools=TOOLS) == qwen.count([user("hi")], tools=TOOLS)
    cut = counter.truncate("word " * 500, 50)
    assert 40 <= counter.count_text(cut) <= 50


def test_is_a_counter_that_says_it_is_exact(qwen: ChatTemplateCounter) -> None:
    assert isinstance(qwen, TokenCounter)
    assert qwen.exact
    assert qwen.margin == 0.0
    assert qwen.name == "chat-template(Qwen3)"


def test_the_fingerprint_changes_with_whatever_changes_counts(
    qwen: ChatTemplateCounter, qwen3_folder: Path
) -> None:
    make = ChatTemplateCounter.from_folder
    variants = [
        make(qwen3_folder, template="{{ messages }}"),
        make(qwen3_folder, template_kwargs={"enable_thinking": False}),
        make(qwen3_folder, dialect="llama.cpp"),
        make(qwen3_folder, image_tokens=7),
    ]
    assert make(qwen3_folder).fingerprint == qwen.fingerprint
    assert len({qwen.fingerprint, *(v.fingerprint for v in variants)}) == 5


def test_what_the_template_refuses_is_refused_with_its_own_words(qwen3_folder: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    counter = ChatTemplateCounter.from_folder(qwen3_folder, template=template)
    with pytest.raises(TemplateRefusedError) as caught:
        counter.count([result("a", "1")])
    assert caught.value.template_message == "no tools here"
    assert pickle.loads(pickle.dumps(caught.value)).template_message == "no tools here"


def test_any_error_in_a_template_is_a_refusal(qwen3_folder: Path) -> None:
    counter = ChatTemplateCounter.from_folder(qwen3_folder, template="{{ messages[0].content + 1 }}")
    with pytest.raises(TemplateRefusedError):
        counter.count([user("hi")])


def test_an_empty_conversation_is_refused_as_by_vllm(qwen: ChatTemplateCounter) -> None:
    with pytest.raises(TemplateRefusedError, match="empty conversation"):
        qwen.count([])


@pytest.mark.parametrize(
    ("template", "content_format"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "string"),
        ("{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", "openai"),
        (
            "{% for m in messages %}{% for c in m.content | list %}{{ c.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ m.content }}{{ show(tools) }}{% endfor %}",
            "string",
        ),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_finds_how_a_template_takes_contents(template: str, content_format: str) -> None:
    from ctxguard.tokens.jinja_template import ChatTemplate

    assert ChatTemplate(template).content_format == content_format


def test_a_template_that_iterates_over_parts_gets_parts(qwen3_folder: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.content %}<{{ c.type }}:{{ c.text }}>{% endfor %}{% endfor %}"
    )
    counter = ChatTemplateCounter.from_folder(qwen3_folder, template=template)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert (
        counter.render([user("hi"), user([{"type": "text", "text": "a"}, image])])
        == "<text:hi><text:a><image:>"
    )


def test_a_template_that_knows_developer_messages_gets_them(qwen3_folder: Path) -> None:
    template = "{% for m in messages %}{{ 'D' if m.role == 'developer' else m.role }}{% endfor %}"
    counter = ChatTemplateCounter.from_folder(qwen3_folder, template=template)
    assert counter.render([{"role": "developer", "content": "x"}]) == "D"


def test_named_templates_are_chosen_as_in_transformers(qwen3_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(qwen3_folder / "tokenizer.json")
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    counter = ChatTemplateCounter.from_folder(tmp_path)
    assert counter.render([user("hi")]) == "plain"
    assert counter.render([user("hi")], tools=TOOLS) == "with tools"
    assert counter.render([user("hi")], template_kwargs={"chat_template": "tool_use"}) == "with tools"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(CounterError, match="'default'"):
        ChatTemplateCounter.from_folder(tmp_path).count([user("hi")])


def test_templates_see_special_tokens_and_time_and_may_mark_generations(
    qwen3_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(qwen3_folder / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "unk_token": None}))
    template = (
        "{{ bos_token }}{{ unk_token }}{% generation %}g{% endgeneration %}{{ strftime_now('%Y') | length }}"
    )
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert ChatTemplateCounter.from_folder(tmp_path).render([user("hi")]) == "<s>g4"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: ChatTemplateCounter.from_folder("Qwen/Qwen3-8B"), "not its name on a hub"),
        (lambda folder: ChatTemplateCounter.from_folder(folder), "no tokenizer.json"),
        (
            lambda folder: ChatTemplateCounter.from_files(folder / "nothing.json", "{{ messages }}"),
            "nothing.json",
        ),
        (lambda folder: ChatTemplateCounter.from_tokenizer(3), "int is not a tokenizer"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CounterError, match=words):
        make(tmp_path)


def test_a_model_without_template_or_with_a_broken_one_is_an_error(
    qwen3_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(qwen3_folder / "tokenizer.json")
    with pytest.raises(CounterError, match="pass template="):
        ChatTemplateCounter.from_folder(tmp_path)
    with pytest.raises(CounterError, match="not valid jinja"):
        ChatTemplateCounter.from_folder(tmp_path, template="{% if %}")
    with pytest.raises(CounterError, match="dialect 'tgi'"):
        ChatTemplateCounter.from_folder(tmp_path, template="{{ messages }}", dialect="tgi")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CounterError, match="not JSON"):
        ChatTemplateCounter.from_folder(tmp_path)


@pytest.mark.parametrize("package", ["jinja2", "tokenizers"])
def test_a_missing_extra_is_named_with_its_install_command(
    package: str,
    qwen: ChatTemplateCounter,
    qwen3_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = qwen3_folder / "tokenizer.json"
    if package == "tokenizers":  # another file than that of `qwen`, whose tokenizer is loaded
        path = tmp_path / "tokenizer.json"
        path.write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CounterError, match=r"ctxguard-sdk\[templates\]"):
        ChatTemplateCounter.from_files(path, "{{ messages }} never compiled before")


def test_media_add_a_stated_estimate_and_no_base64(qwen: ChatTemplateCounter) -> None:
    url = {"url": "data:image/png;base64," + "A" * 100_000}
    with_image = [user([{"type": "text", "text": "look"}, {"type": "image_url", "image_url": url}])]
    assert qwen.count(with_image) - qwen.count([user("look")]) == 1445
