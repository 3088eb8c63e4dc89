"""The real llama.cpp server, started and stopped around a ``with`` block.

    from ctxguard.testing.llama_cpp import LlamaCppServer
    from ctxguard.testing.tiny_model import cache_folder, write_gguf

    with LlamaCppServer(write_gguf(cache_folder()), window=4096, slots=2) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        client.chat.completions.create(model=server.model, messages=[…])

It is llama.cpp's own C++ HTTP server, from the wheel ``xllamacpp``, on a free loopback port. With the model
of `ctxguard.testing.tiny_model` it counts, refuses and reports usage as for a real Qwen3; it is ready in
about two seconds and takes about 200 MB of memory.

By hand: ``python -m ctxguard.testing.llama_cpp --model tiny-qwen3.gguf --window 4096 --port 8080``.

Needs ``pip install "ctxguard-sdk[demo]"``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ctxguard.errors import ConfigurationError
from ctxguard.testing.child_process import ChildProcess, die_with_parent

_WINDOW_STEP = 256  # llama.cpp rounds the window of a slot up to a multiple of this


class LlamaCppServer:
    """A llama.cpp server for tests and demos; a context manager.

    Args:
        model_path: a GGUF file.
        window: context window of *each* slot, in tokens; a multiple of 256.
        slots: how many requests are worked on at once; more of them wait.
        model: the name under which the model is served.
        context_shift: llama.cpp's own way out of a full window while generating: drop the oldest tokens in
            silence. Off, as it is by default in llama.cpp.
        threads: threads for computing; 1 by default, see below.
        start_timeout_seconds: how long the server may take until it answers.

    Raises:
        ConfigurationError: ``xllamacpp`` is missing, the model file is, or the window is no multiple of 256.
        ServerUnavailableError: the server did not start; the message ends with its last lines.

    llama.cpp's threads wait for each other actively. Where the agents need the cores too, a second thread
    makes a tiny model slower, not faster.
    """

    url: str
    """The server's root, e.g. ``http://127.0.0.1:40123``, for ``/props`` and the like."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        window: int,
        slots: int = 1,
        model: str = "tiny-qwen3",
        context_shift: bool = False,
        threads: int = 1,
        start_timeout_seconds: float = 60.0,
    ) -> None:
        if importlib.util.find_spec("xllamacpp") is None:
            raise ConfigurationError(
                'the llama.cpp server needs the package xllamacpp: pip install "ctxguard-sdk[demo]"',
                package="xllamacpp",
            )
        if window < _WINDOW_STEP or window % _WINDOW_STEP:
            raise ConfigurationError(
                f"window={window} is no multiple of {_WINDOW_STEP}: llama.cpp would round it up in silence"
            )
        if slots < 1 or threads < 1:
            raise ConfigurationError(f"slots={slots} and threads={threads} must be at least 1")
        if not Path(model_path).is_file():
            raise ConfigurationError(f"no model file at {model_path}")
        self.model_path = Path(model_path)
        self.window = window
        self.slots = slots
        self.model = model
        self.context_shift = context_shift
        self.threads = threads
        self.start_timeout_seconds = start_timeout_seconds
        self._child: ChildProcess | None = None

    @property
    def base_url(self) -> str:
        """What an OpenAI client wants: the root and ``/v1``."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs, else None."""
        return self._child.pid if self._child else None

    def start(self) -> LlamaCppServer:
        """Start it and return when it answers requests; ``with`` does this."""
        if self._child is not None:
            return self
        command = [sys.executable, "-m", "ctxguard.testing.llama_cpp", "--die-with-parent"]
        command += ["--model", str(self.model_path), "--alias", self.model]
        command += ["--window", str(self.window), "--slots", str(self.slots), "--threads", str(self.threads)]
        command += ["--context-shift"] if self.context_shift else []
        # The child has to find the same ctxguard, also when it runs from a source tree that is not installed.
        package_root = str(Path(__file__).parents[2])
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        child = self._child = ChildProcess("the llama.cpp server", command, {"PYTHONPATH": search_path})
        try:
            self.url = child.wait_until(lambda: _listening_url(child.output()), self.start_timeout_seconds)
            child.wait_until(self._is_healthy, self.start_timeout_seconds)
            self._check_answers(child)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill it; ``with`` does this. Harmless when it is not running."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def log(self) -> str:
        """What the server has written so far; empty when it is not running."""
        return self._child.output() if self._child else ""

    def __enter__(self) -> LlamaCppServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _is_healthy(self) -> bool | None:
        """None while it loads the model (503, or nothing yet)."""
        try:
            return _request(f"{self.url}/health") == {"status": "ok"} or None
        except OSError:
            return None

    def _check_answers(self, child: ChildProcess) -> None:
        hello = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        try:
            _request(f"{self.base_url}/chat/completions", hello)
            served = _request(f"{self.url}/props")["default_generation_settings"]["n_ctx"]
        except OSError as error:
            raise child.unavailable(f"did not answer a first request ({error})") from error
        if served != self.window:
            raise child.unavailable(f"serves a window of {served} tokens, not {self.window}")


def _listening_url(output: str) -> str | None:
    found = re.search(r"^ctxguard: listening on (http://\S+)$", output, re.MULTILINE)
    return found.group(1) if found else None


def _request(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    # No proxy: a proxy set in the environment must not see requests to loopback.
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        raise


# --- the child ----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve one model in this process until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m ctxguard.testing.llama_cpp", description=main.__doc__)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--alias", default="tiny-qwen3", help="name under which the model is served")
    parser.add_argument("--window", type=int, default=4096, help="context window of each slot, in tokens")
    parser.add_argument("--slots", type=int, default=1, help="requests worked on at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--context-shift", action="store_true")
    parser.add_argument("--die-with-parent", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.die_with_parent:
        die_with_parent()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.window * options.slots
    params.kv_unified = False  # each slot has its window to itself
    params.ctx_shift = options.context_shift
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = 0
    params.offline = True
    params.warmup = False
    params.ui = False
    params.endpoint_props = True
    params.cache_prompt = True  # a slot computes only what its last prompt did not begin with
    params.cache_ram_mib = 0  # but no copies of old prompts: 240 MB for nothing here
    params.n_threads_http = 64  # each idle keep-alive connection of a client holds one
    server = xllamacpp.Server(params)
    sys.stdout.write(f"\nctxguard: listening on {server.listening_address}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        os._exit(0)  # the server's own tear-down is not worth waiting for


if __name__ == "__main__":
    main()
