"""Start the real vLLM API server on the CPU, with the tiny model and a small window, and end it cleanly.

Run inside the vLLM virtualenv (`make test-vllm`), or with CTXGUARD_VLLM_PYTHON naming that virtualenv's Python
(`make test-agl`). The child is this file again: it arranges to die with its
parent and then becomes vLLM's own entry point.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from ctxguard.testing.child_process import ChildProcess, die_with_parent, free_port

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine
}


class VllmServer:
    """The vLLM API server as a context manager.

    Args:
        model_folder: what `ctxguard.testing.tiny_model.write_hf_model` wrote.
        window: ``--max-model-len``.
        model: the name under which it is served.
        max_output_tokens: of an answer, where a request says nothing, and at most. Agent Lightning's proxy asks
            whether the server is there with a request without a limit: by default this would fill the window.
        start_timeout_seconds: 30 s on an idle machine, minutes where it has to share the cores.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        window: int = 2048,
        model: str = "tiny-qwen3",
        max_output_tokens: int | None = None,
        start_timeout_seconds: float = 600.0,
    ) -> None:
        self.model_folder = model_folder
        self.window = window
        self.model = model
        self.max_output_tokens = max_output_tokens
        self.start_timeout_seconds = start_timeout_seconds
        self.url = ""
        self._child: ChildProcess | None = None

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def log(self) -> str:
        return self._child.output() if self._child else ""

    def __enter__(self) -> VllmServer:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        python = os.environ.get("CTXGUARD_VLLM_PYTHON") or sys.executable
        command = [python, __file__, "--model", str(self.model_folder)]
        command += ["--served-model-name", self.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--max-model-len", str(self.window), "--max-num-seqs", "8", "--dtype", "bfloat16"]
        command += ["--enforce-eager", "--enable-prefix-caching", "--enable-force-include-usage"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        if self.max_output_tokens is not None:
            command += [
                "--override-generation-config",
                json.dumps({"max_new_tokens": self.max_output_tokens}),
            ]
        package_root = str(Path(__file__).parents[2])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        child = self._child = ChildProcess("vLLM", command, {**ENVIRONMENT, "PYTHONPATH": search_path})
        try:
            child.wait_until(self._answers, self.start_timeout_seconds)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._child is not None:
            # vLLM shares memory between its processes, which it removes when it may end by itself.
            self._child.stop(grace_seconds=10.0)
            self._child = None

    def _answers(self) -> bool | None:
        """None while it starts: no connection, or a 503."""
        try:
            self._post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            )
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            return None
        return True

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy to loopback
        with opener.open(request, timeout=120) as answer:
            return json.load(answer)


if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
