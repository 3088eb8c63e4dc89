"""Test your agent without a model: a real HTTP server that knows its window, and answers that you write.

    from ctxguard.testing import ScriptedModel, WindowedServer, tool_call

    model = ScriptedModel([tool_call("read", {"path": "a.py"}), "It prints hello."])
    with WindowedServer(counter, window=2048, model=model, style="vllm") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        run_my_agent(client)
    assert len(server.requests) == 2

Beside it, for a server that is real all through and only small (``pip install "ctxguard-sdk[demo]"``):
`ctxguard.testing.tiny_model` writes a model with Qwen3's vocabulary and chat template, and
`ctxguard.testing.llama_cpp` runs llama.cpp with it.
"""

from ctxguard.testing.refusals import Style
from ctxguard.testing.scripted_model import ScriptedModel, tool_call
from ctxguard.testing.windowed_server import RecordedRequest, WindowedServer

__all__ = ["RecordedRequest", "ScriptedModel", "Style", "WindowedServer", "tool_call"]
