"""Contents of every shape can be read and rewritten, and bad input is named."""

from __future__ import annotations

import pytest

from ctxguard import InvalidMessagesError
from ctxguard.messages import as_messages, part_texts, text_of, with_part_texts

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "must be a list of mappings"),
        ({"role": "user"}, "must be a list of mappings"),
        (None, "must be a list of mappings"),
        (["hello"], r"messages\[0\] is a str"),
        ([{"role": "user", "content": "u"}, {"content": "x"}], r"messages\[1\] has no string 'role'"),
        ([{"role": "user", "content": 7}], r"messages\[0\]\['content'\]"),
        ([{"role": "user", "content": [7]}], r"messages\[0\]\['content'\]"),
    ],
)
def test_bad_input_is_named(messages, says):
    with pytest.raises(InvalidMessagesError, match=says):
        as_messages(messages)


def test_dicts_come_back_as_the_same_objects():
    message = {"role": "user", "content": "u"}
    assert as_messages([message])[0] is message


def test_pydantic_messages_are_dumped_as_the_sdk_dumps_them():
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "refusal": "no"})
    assert as_messages([message]) == [{"role": "assistant", "content": None, "refusal": "no"}]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (None, []),
        ("", []),
        ("a", ["a"]),
        ([{"type": "text", "text": "a"}, IMAGE, {"type": "refusal", "refusal": "b"}], ["a", None, "b"]),
        (["bare"], ["bare"]),
    ],
)
def test_texts_of_every_shape(content, texts):
    message = {"role": "user", "content": content}
    assert part_texts(message) == texts
    assert text_of(message) == "\n".join(t for t in texts if t)


def test_replacing_a_part_leaves_the_others_and_their_fields():
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [cached, IMAGE], "name": "n"}
    replaced = with_part_texts(message, {0: "b"})
    assert replaced == {"role": "user", "content": [{**cached, "text": "b"}, IMAGE], "name": "n"}
    assert replaced["content"][1] is IMAGE
    assert message["content"][0]["text"] == "a"
