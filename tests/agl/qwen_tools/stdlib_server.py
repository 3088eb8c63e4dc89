"""An MCP server over stdio: the functions of a module of Python's standard library, described by their docstrings.

    python tests/agl/qwen_tools/stdlib_server.py statistics

Long, real descriptions: a few of these make a tool schema as large as that of a run with eight MCP servers.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from mcp.server.fastmcp import FastMCP


def functions_of(module_name: str) -> dict[str, Callable[..., Any]]:
    """The public functions of a module that are described and can be called by argument names."""
    module = importlib.import_module(module_name)
    public = {name: getattr(module, name) for name in module.__all__}
    return {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function) and function.__doc__ and _takes_names(function)
    }


def _takes_names(function: Callable[..., Any]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def main() -> None:
    module_name = sys.argv[1]
    server = FastMCP(module_name, log_level="ERROR")
    warnings.simplefilter("ignore")  # a default that is a function is left out of the schema, with a warning
    for name, function in functions_of(module_name).items():
        server.add_tool(function, name=name, description=inspect.getdoc(function))
    server.run("stdio")


if __name__ == "__main__":
    main()
