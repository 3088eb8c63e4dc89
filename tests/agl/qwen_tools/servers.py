"""The MCP servers of these tests, all over stdio: three published ones, and modules of the standard library."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

OWN = Path(__file__).with_name("stdlib_server.py")
MODULES = ("statistics", "difflib")
PARTS = 84
"""Parts on each shelf; a query for a shelf answers with some 5,300 tokens."""


def write_data(folder: Path) -> None:
    """What the servers serve: a data base of parts, and a repository whose commits are about as large."""
    connection = sqlite3.connect(folder / "parts.db")
    with connection:
        connection.execute("CREATE TABLE parts (shelf INTEGER, name TEXT, weight INTEGER, note TEXT)")
        rows = [(shelf, part) for shelf in range(4) for part in range(PARTS)]
        connection.executemany(
            "INSERT INTO parts VALUES (?, ?, ?, ?)",
            [
                (
                    s,
                    f"part-{s}-{p}",
                    p * 7 % 59,
                    f"Bin {p * 31 % 97}, checked in week {p}, {'very ' * 20}good.",
                )
                for s, p in rows
            ],
        )
    connection.close()
    repository = folder / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    for number in range(4):
        lines = [
            f"Step {n} of plan {number}: carry bin {n * 37 % 101} to shelf {n % 4}.\n" for n in range(160)
        ]
        (repository / f"plan-{number}.txt").write_text("".join(lines))
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "--message", f"Plan {number}")


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=repository, check=True)


def mcp_servers(folder: Path) -> dict[str, Any]:
    """Qwen-Agent's configuration of the servers."""
    bin_folder = Path(sys.executable).parent
    servers = {
        "sqlite": [str(bin_folder / "mcp-server-sqlite"), "--db-path", str(folder / "parts.db")],
        "git": [sys.executable, "-m", "mcp_server_git", "--repository", str(folder / "repository")],
        "time": [sys.executable, "-m", "mcp_server_time"],
        **{module: [sys.executable, str(OWN), module] for module in MODULES},
    }
    return {
        "mcpServers": {
            name: {"command": command, "args": arguments} for name, (command, *arguments) in servers.items()
        }
    }
