"""``python -m examples.demo``: see the package's docstring for what it shows."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import openai

from ctxguard import ChatTemplateCounter, CtxguardError
from ctxguard.testing.llama_cpp import LlamaCppServer
from ctxguard.testing.tiny_model import cache_folder, write_gguf
from examples.demo.rollouts import Runner
from examples.demo.screen import Screen
from examples.demo.tasks import make_tasks
from examples.demo.tools import SourceTree
from examples.demo.verdict import Verdict

INTRODUCTION = """\
Agents look things up in the sources of Python's standard library until their histories outgrow the window of
the server. Server, counts, refusals and tool results are real. The model is tiny and has random weights: its
text is thrown away and the agents' tool choices are scripted, so a reward says that an agent could finish; it
says nothing about a model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0 if everything held that must."""
    options = _options(arguments)
    screen = Screen()
    try:
        verdict = _run(options, screen)
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.say("\nStopped; the server is gone.")
        return 130
    except CtxguardError as error:
        screen.say(f"{type(error).__name__}: {error}", style="red")
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(verdict.to_dict(), indent=2) + "\n")
    return 1 if verdict.problems else 0


def _run(options: argparse.Namespace, screen: Screen) -> Verdict:
    started = time.monotonic()
    screen.say(INTRODUCTION)
    model_path = write_gguf(cache_folder())  # 16 MB, made once; the tokenizer lies next to it
    with LlamaCppServer(model_path, window=options.window, slots=options.rollouts) as server:
        verdict = asyncio.run(_both_phases(server, options.seed, screen))
    screen.verdict(verdict, time.monotonic() - started)
    return verdict


async def _both_phases(server: LlamaCppServer, seed: int, screen: Screen) -> Verdict:
    _end_all_on_ctrl_c()
    tree = SourceTree.of_standard_library()
    tasks = make_tasks(tree, rollouts=server.slots, window=server.window, seed=seed)
    counter = ChatTemplateCounter.from_folder(server.model_path.parent, dialect="llama.cpp")
    # No proxy from the environment: requests to loopback must not leave the machine.
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", http_client=http) as client:
        runner = Runner(client, server.model, tree, tasks, counter, screen)
        with screen.phase(f"Unguarded: {len(tasks)} rollouts, window {server.window}", tasks):
            unguarded = await runner.unguarded()
        screen.table(unguarded)
        with screen.phase("Guarded: the same rollouts", tasks):
            guarded = await runner.guarded()
        screen.table(guarded)
    return Verdict(server.window, unguarded, guarded)


def _end_all_on_ctrl_c() -> None:
    """Let Ctrl-C cancel the main task. Python 3.10 would interrupt whichever agent happens to run."""
    main_task = asyncio.current_task()
    assert main_task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, main_task.cancel)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="ctxguard's main job, on a real server."
    )
    parser.add_argument("--rollouts", type=int, help="agents that run at once (default: 8)")
    parser.add_argument("--window", type=int, help="the server's window for each, in tokens (default: 20480)")
    parser.add_argument("--seed", type=int, default=0, help="decides what the agents are to find")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="4 agents and a window of 8192, for CI")
    options = parser.parse_args(arguments)
    rollouts, window = (4, 8192) if options.quick else (8, 20480)
    options.rollouts = rollouts if options.rollouts is None else options.rollouts
    options.window = window if options.window is None else options.window
    if not 1 <= options.rollouts <= 32:
        parser.error(f"--rollouts must be 1 to 32, not {options.rollouts}")
    if options.window not in range(4096, 40961, 256):
        parser.error(f"--window must be a multiple of 256 from 4096 to 40960, not {options.window}")
    return options


if __name__ == "__main__":
    sys.exit(main())
