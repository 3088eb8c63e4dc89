"""The demo itself, on the real llama.cpp server: what it shows, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxguard.testing.tiny_model import cache_folder, write_gguf
from examples.demo.agent import MAX_TOKENS

pytestmark = [pytest.mark.llamacpp, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROC = Path("/proc")
WINDOW = 8_192


@pytest.fixture
def start(tmp_path):
    """Starts the demo in a folder for temporary files of its own."""
    write_gguf(cache_folder())
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "CTXGUARD_TEST": str(tmp_path)}
    processes = []

    def run(*arguments):
        command = [sys.executable, "-u", "-m", "examples.demo", "--quick", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def left_behind(tmp_path):
    """Processes and temporary files of the demo that still exist."""
    files = [str(path) for path in (tmp_path / "tmp").iterdir()]
    marker = f"CTXGUARD_TEST={tmp_path}".encode()
    return files + [path.parent.name for path in PROC.glob("[0-9]*/environ") if marker in _read(path)]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:  # another user's process, or one that just ended
        return b""


def test_the_demo_shows_what_it_promises(start, tmp_path):
    process = start("--json", str(tmp_path / "demo.json"))
    out, err = (text.decode() for text in process.communicate(timeout=300))
    assert process.returncode == 0, out + err
    assert err == ""
    assert {char for char in out if not char.isprintable()} == {"\n"}
    assert left_behind(tmp_path) == []

    demo = json.loads((tmp_path / "demo.json").read_text())
    assert demo["problems"] == []
    assert demo["window"] == WINDOW
    assert [row["form"] for row in demo["guarded"]] == ["native", "text", "parallel", "reminder", "native"]
    assert {row["status"] for row in demo["unguarded"]} == {"no result"}
    assert all(row["peak_prompt_tokens"] >= WINDOW and row["refusals"] == 1 for row in demo["unguarded"])
    *carried, pasted = demo["guarded"]
    for row in carried:
        assert (row["status"], row["refusals"]) == ("succeeded", 0)
        assert row["compactions"] >= 1
        assert row["peak_prompt_tokens"] <= WINDOW - MAX_TOKENS < row["history_tokens"]
        assert row["differences"] == [0] * row["calls"]
        assert 0 < row["reward"] <= 1
    assert (pasted["status"], pasted["reason"], pasted["calls"]) == ("failed", "context_overflow", 1)
    assert f"{pasted['history_tokens']:,} tokens, limit {WINDOW - MAX_TOKENS:,}" in pasted["outcome"]
    assert all(line in out for line in demo["summary"])
    calls = sum(row["calls"] for row in carried)
    assert f"predicted = served on {calls}/{calls} guarded calls" in out


@pytest.mark.skipif(not PROC.is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize("phase", ["Agents", "Unguarded", "Guarded"])
def test_ctrl_c_leaves_nothing_behind(phase, start, tmp_path):
    process = start()
    while not process.stdout.readline().decode().startswith(phase):
        assert process.poll() is None
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    assert b"Stopped" in out
    assert err == b""
    assert left_behind(tmp_path) == []
