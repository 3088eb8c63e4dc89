"""A model whose answers are written down beforehand: deterministic, instant, free."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Reply: TypeAlias = "str | Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""Text, one tool call or several (see `tool_call`), or a whole assistant message."""

Script: TypeAlias = "Callable[[list[Message], list[Message]], Reply]"
"""Called with the messages and tools of a request, returns the reply."""


def tool_call(name: str, arguments: Mapping[str, Any] | str = "{}", id: str | None = None) -> dict[str, Any]:
    """A tool call as a model makes it.

    Args:
        name: the tool's name.
        arguments: its arguments, as a mapping or as the JSON text that goes over the wire.
        id: the call's id; None lets `ScriptedModel` number it (``call_1``, ``call_2``, …).

    Example:
        >>> tool_call("read", {"path": "a.py"}, id="c1")["function"]
        {'name': 'read', 'arguments': '{"path": "a.py"}'}
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call: dict[str, Any] = {} if id is None else {"id": id}
    return {**call, "type": "function", "function": {"name": name, "arguments": text}}


class ScriptedModel:
    """Answers from a list, in order, or by asking a function.

    Args:
        script: the replies in order, or a function ``(messages, tools) -> reply`` that is asked every time.
            A reply is a text, a tool call, a list of tool calls (made in parallel), or a whole message. In a
            list, a function may stand in place of a reply.
        then: what to answer after the end of a list; None raises.

    A list suits one conversation. Where several share the model, give a function that decides by the
    messages: which conversation asks first is up to the scheduler.

    Example:
        >>> model = ScriptedModel([tool_call("read", {"path": "a.py"}), "It prints hello."])
        >>> model.reply([{"role": "user", "content": "What does a.py do?"}])["tool_calls"][0]["id"]
        'call_1'
        >>> model.reply([])
        {'role': 'assistant', 'content': 'It prints hello.'}
        >>> ScriptedModel(lambda messages, tools: f"{len(messages)} messages").reply([{}, {}])["content"]
        '2 messages'
    """

    def __init__(
        self, script: Script | Iterable[Reply | Script], *, then: Reply | Script | None = None
    ) -> None:
        self._script = script if callable(script) else list(script)
        self._then = then
        self._lock = threading.Lock()
        self._replies = 0
        self._tool_calls = 0

    @property
    def replies(self) -> int:
        """How many times it has answered."""
        return self._replies

    def reply(self, messages: Sequence[Message], tools: Sequence[Message] | None = None) -> dict[str, Any]:
        """The next assistant message: ``{"role": "assistant", "content": …}``, with ``tool_calls`` if any.

        Raises:
            LookupError: the list is at its end and there is no ``then``.
        """
        with self._lock:
            number = self._replies
            self._replies += 1
        step = self._step(number)
        # Outside of the lock: a script may take its time, and others may ask meanwhile.
        reply = step(list(messages), list(tools or ())) if callable(step) else step
        return self._as_message(reply)

    def _step(self, number: int) -> Reply | Script:
        if callable(self._script):
            return self._script
        if number < len(self._script):
            return self._script[number]
        if self._then is None:
            raise LookupError(
                f"the script has {len(self._script)} replies and was asked for reply {number + 1}: "
                "make it longer, or say what comes then: ScriptedModel(script, then=…)"
            )
        return self._then

    def _as_message(self, reply: Reply) -> dict[str, Any]:
        if isinstance(reply, str):
            return {"role": "assistant", "content": reply}
        if isinstance(reply, Mapping):
            if "function" in reply:
                return self._calling([reply])
            message = {"role": "assistant", "content": None, **copy.deepcopy(dict(reply))}
            if message.get("tool_calls"):
                message["tool_calls"] = self._calling(message["tool_calls"])["tool_calls"]
            return message
        return self._calling(reply)

    def _calling(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": None, "tool_calls": [self._with_id(call) for call in calls]}

    def _with_id(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if call.get("id") is not None:
            return copy.deepcopy(dict(call))
        with self._lock:
            self._tool_calls += 1
            number = self._tool_calls
        return {
            "id": f"call_{number}",
            **{key: copy.deepcopy(value) for key, value in call.items() if key != "id"},
        }
