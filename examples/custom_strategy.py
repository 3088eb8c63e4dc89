"""A compaction strategy of your own: whole turns in, whole turns out.

``MODEL=Qwen/Qwen3-8B TOKENIZER=/models/Qwen3-8B python -m examples.custom_strategy``
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from ctxguard import CompactionStrategy, Turn, default_strategies, wrap_openai
from ctxguard.compaction import CompactionContext
from ctxguard.events import Compacted, Event


@dataclass(frozen=True)
class DropRepeatedResults(CompactionStrategy):
    """Replace tool results that a later result repeats word for word: nothing is lost by it."""

    note: str = "[the same as a later result]"

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        newest = {s.text: i for i, turn in enumerate(turns) for s in turn.spans if s.kind == "result"}
        need, compacted = context.need, []
        for position, turn in enumerate(turns):
            repeated = {}
            if need > 0 and not (turn.pinned or turn.newest):
                results = [s for s in turn.spans if s.kind == "result" and len(s.text) > len(self.note)]
                repeated = {s: self.note for s in results if newest[s.text] > position}
                need -= sum(context.counter.count_text(s.text) for s in repeated)
            compacted.append(turn.with_texts(repeated) if repeated else turn)
        return compacted


def main() -> None:
    """A tool is asked again and again and says the same; old answers make room for new ones."""
    strategies, tokenizer = [DropRepeatedResults(), *default_strategies()], os.environ.get("TOKENIZER")
    client = wrap_openai(OpenAI(), tokenizer=tokenizer, strategies=strategies, on_event=tell)
    status = "compiling, please wait ... " * 30
    messages: list[Any] = [{"role": "user", "content": "Wait until the build is done."}]
    for number in range(40):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "status", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": status})
        client.chat.completions.create(model=os.environ["MODEL"], messages=messages, max_tokens=64)


def tell(event: Event) -> None:
    """Print each compaction."""
    if isinstance(event, Compacted):
        print(f"call {event.call}: {event.tokens_before} to {event.tokens_after} tokens, {event.strategies}")


if __name__ == "__main__":
    main()
