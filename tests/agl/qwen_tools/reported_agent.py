"""The agent of the reported run, small: Qwen-Agent in text form with MCP tools; with ctxguard and without it.

The model's weights are random, so each request tells the server which texts it may answer with (vLLM's structured
outputs); which of them it is, the model chooses. Everything else is as in production: Qwen-Agent writes the tools into the
system message, reads the calls out of the text, calls the MCP servers, and sends the whole history each time.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from qwen_agent.agents import Assistant
from qwen_agent.llm.base import ModelServiceError
from qwen_agent.llm.schema import FUNCTION
from qwen_agent.tools.mcp_manager import MCPManager

from ctxguard import ChatTemplateCounter, ContextBudget, Guard
from ctxguard.integrations.agentlightning import mark_failures
from ctxguard.integrations.qwen_agent import llm_config, use_guard
from ctxguard.testing.tiny_model import cache_folder, write_tokenizer
from tests.agl.qwen_tools.servers import mcp_servers

logger = logging.getLogger(__name__)

FOLDER = Path(os.environ.get("CTXGUARD_TEST_DATA", "."))
CONFIG = {
    "data": {"max_prompt_length": 12288, "max_response_length": 8192, "truncation": "error"},
    "actor_rollout_ref": {"rollout": {"max_model_len": 20480, "n": 8}},
}
COUNTER = ChatTemplateCounter.from_folder(write_tokenizer(cache_folder()))
use_guard(Guard(ContextBudget.from_verl(CONFIG), counter=COUNTER))


@functools.cache
def tools() -> list[Any]:
    return list(MCPManager().initConfig(mcp_servers(FOLDER)))


def call(tool: str, **arguments: Any) -> str:
    """A tool call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def answers(task: dict[str, Any]) -> list[list[str]]:
    """For each step the texts that the model may choose from; the last is its answer."""
    shelf = task["shelf"]
    repository = str(FOLDER / "repository")
    return [
        [call("sqlite-read_query", query=f"SELECT * FROM parts WHERE shelf = {shelf}")],
        [call("git-git_show", repo_path=repository, revision=f"HEAD~{n}") for n in range(3)],
        [
            call("sqlite-read_query", query=f"SELECT * FROM parts WHERE shelf = {n}")
            for n in range(4)
            if n != shelf
        ],
        [call("statistics-mean", data=[1, 2, weight]) for weight in (3, 6, 9)],
        [f"The heaviest is part-{shelf}-{part}." for part in (task["part"], 0)],
    ]


class DrivenAssistant(Assistant):  # type: ignore[misc]
    """An `Assistant` whose server is told what it may answer at each step."""

    def __init__(self, answers: Sequence[Sequence[str]], **options: Any) -> None:
        super().__init__(**options)
        self.answers = answers
        self.request: dict[str, Any] = {}

    def _call_llm(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        step = sum(message.role == FUNCTION for message in messages)
        self.extra_generate_cfg = {
            "extra_body": {"structured_outputs": {"choice": list(self.answers[step])}},
            # Qwen-Agent's random seed ends vLLM's CPU worker when a prompt is computed in parts (0.32.0,
            # `_bookkeeping_sync`: "CPU Generator does not use offset").
            "seed": None,
        }
        self.request = {"messages": list(messages), "functions": kwargs["functions"]}
        return super()._call_llm(messages, *args, **kwargs)

    def prompt_tokens(self) -> int:
        """Size of the newest prompt, in tokens of the served model."""
        text_form = self.llm._preprocess_messages(**self.request, lang="en", generate_cfg={})
        return COUNTER.count(self.llm.convert_messages_to_dicts(text_form))


def work(task: dict[str, Any], llm: dict[str, Any]) -> float:
    agent = DrivenAssistant(answers(task), llm=llm, function_list=tools())
    question = f"Which part on shelf {task['shelf']} is the heaviest, and do the plans say so?"
    try:
        said = agent.run_nonstream([{"role": "user", "content": question}])
    except ModelServiceError:
        logger.warning("refused: a prompt of %d tokens", agent.prompt_tokens())
        raise
    results = [message for message in said if message["role"] == FUNCTION]
    assert len(results) == 4
    assert f"part-{task['shelf']}-{task['part']}" in results[0]["content"]
    return float(f"part-{task['shelf']}-{task['part']}." in said[-1]["content"])


@mark_failures
class Guarded(agl.LitAgent):  # type: ignore[misc]
    """With ctxguard."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return work(task, llm_config(resources, rollout))


class Unguarded(agl.LitAgent):  # type: ignore[misc]
    """Without it: Qwen-Agent's own chat class."""

    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        return work(task, {**llm_config(resources, rollout), "model_type": "oai"})
