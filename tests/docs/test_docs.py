"""What the pages say is true: their code runs, their links lead somewhere, their quotes and defaults are the code's."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import doctest
import functools
import importlib
import inspect
import io
import pkgutil
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import ctxguard
from ctxguard import ChatTemplateCounter, ContextBudget, errors
from ctxguard.client.overflow import RequestFacts, classify
from ctxguard.testing import WindowedServer, tool_call

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = ROOT / "docs" / "reference.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its fences."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


# Code


@pytest.fixture(scope="module")
def counter(qwen3_folder: Path) -> ChatTemplateCounter:
    return ChatTemplateCounter.from_folder(qwen3_folder)


@pytest.fixture
def surroundings(
    counter: ChatTemplateCounter, qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What a reader has: a served model, its address in the environment, and its tokenizer in models/Qwen3-8B."""

    def answer(messages: list[Any], tools: list[Any]) -> Any:
        """Reads one file after the other as long as it may use tools, else answers."""
        if not tools:
            return "The answer is 42."
        read = sum(message["role"] == "tool" for message in messages)
        return tool_call(tools[0]["function"]["name"], {"path": f"part_{read}.py"})

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Qwen3-8B").symlink_to(qwen3_folder)
    monkeypatch.chdir(tmp_path)
    with WindowedServer(counter, window=20480, model=answer, model_name="Qwen/Qwen3-8B") as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, surroundings: None) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    text = page.read_text(encoding="utf-8")
    try:
        for fence in FENCE.finditer(text):
            if fence[1] == "python":
                run_fence(fence[2], page.name, text[: fence.start(2)].count("\n"), namespace)
    finally:
        for value in namespace.values():
            if isinstance(value, openai.OpenAI):
                value.close()


def run_fence(source: str, name: str, line: int, namespace: dict[str, Any]) -> None:
    """Run a fence and the tests that it defines; each ``# prints: …`` is a line that it prints."""
    before = set(namespace)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + source, name, "exec"), namespace)
        for test in [namespace[new] for new in namespace if new not in before and new.startswith("test_")]:
            test()
    assert printed.getvalue().splitlines() == re.findall(r"^\s*# prints: (.*)$", source, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_only_known_kinds_of_fences_are_used(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(FENCE.findall(text)), "a fence without a language is not checked"
    assert {kind for kind, _ in FENCE.findall(text)} <= {"python", "sh", "text", "pycon"}


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(ctxguard.__path__, "ctxguard."):
        yield module.name


# Integrations that need what only the environments of `make test-agl` and `make test-agl1` have.
OF_OTHER_ENVIRONMENTS = {
    f"ctxguard.integrations.{name}"
    for name in (
        "agentlightning.advantages",
        "agentlightning.hooks",
        "agentlightning.legacy",
        "agentlightning.v0_client",
        "agentlightning.verl",
        "agentlightning_v1.adapter",
        "agentlightning_v1.entrypoint",
        "agentlightning_v1.hooks",
        "agentlightning_v1.manager",
        "agentlightning_v1.trainer",
        "qwen_agent",
    )
}
NOT_HERE = {"agentlightning", "qwen_agent", "ray", "torch", "verl"}


@pytest.mark.filterwarnings("ignore::ctxguard.tokens.ApproximateCountWarning")
@pytest.mark.parametrize("name", ["ctxguard", *modules()])
def test_examples_in_docstrings_are_true(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if name not in OF_OTHER_ENVIRONMENTS or missing not in NOT_HERE:
            raise
        pytest.skip(f"{missing} is not installed here")
    names = {public: getattr(ctxguard, public) for public in ctxguard.__all__}
    assert doctest.testmod(module, extraglobs=names).failed == 0


def test_no_example_waits_to_be_run_where_it_cannot_be_imported() -> None:
    """What is skipped above holds only examples that are marked as not to be run."""
    assert set(modules()) >= OF_OTHER_ENVIRONMENTS
    for name in OF_OTHER_ENVIRONMENTS:
        file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for example in doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""):
                    assert example.options.get(doctest.SKIP), f"{file}: {example.source}"


# Links, commands


def cells_with_a_test() -> list[tuple[str, str]]:
    """``(file, test)`` of every link that names a test as its title."""
    page = ROOT / "docs" / "agent-lightning.md"
    return re.findall(r'\]\(\.\./(tests/\S+\.py) "(test_\w+)"\)', page.read_text(encoding="utf-8"))


def test_a_cell_of_the_version_table_names_a_test_that_exists() -> None:
    table = [row for row in rows(ROOT / "docs" / "agent-lightning.md") if len(row) == 6][2:]
    assert sum(cell.startswith("[") for row in table for cell in row) == len(cells_with_a_test()) > 40
    assert {cell for row in table for cell in row[1:] if not cell.startswith("[")} == {
        "no such setting", "it has none",
    }  # fmt: skip
    for file, test in cells_with_a_test():
        source = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {test}\(", source, re.MULTILINE), (file, test)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert ROOT in linked.parents, f"{target} leads out of the project"
        if anchor:
            assert anchor in anchors(linked), target


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [
        page.name for page in PAGES if page.name != "README.md" and f"(docs/{page.name})" not in readme
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert (
        set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)) <= targets
    )


# Defaults, names


def rows(page: Path) -> list[list[str]]:
    """The cells of the tables on a page."""
    lines = re.findall(r"^\|(.+)\|$", prose(page), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def default_of(path: str) -> Any:
    """The default of ``Class.setting`` or ``function.argument``."""
    owner, _, setting = path.partition(".")
    thing = getattr(ctxguard, owner)
    if thing is ContextBudget:
        return ContextBudget.model_fields[setting].default
    if dataclasses.is_dataclass(thing):
        field = next(field for field in dataclasses.fields(thing) if field.name == setting)
        made = field.default_factory
        return field.default if made is dataclasses.MISSING else made()
    return inspect.signature(thing).parameters[setting].default


def quoted_defaults() -> list[tuple[str, str, str]]:
    path = re.compile(r"[A-Za-z_]+\.[a-z_]+")
    return [
        (page.name, cells[0], cells[1])
        for page in PAGES
        for cells in rows(page)
        if len(cells) > 2 and path.fullmatch(cells[0]) and hasattr(ctxguard, cells[0].split(".")[0])
    ]


def test_defaults_are_quoted_somewhere() -> None:
    quoted = {path for _, path, _ in quoted_defaults()}
    assert {
        "ContextBudget.high_mark",
        "ContextBudget.low_mark",
        "ContextBudget.max_response_tokens",
    } <= quoted


@pytest.mark.parametrize(("page", "path", "quoted"), quoted_defaults())
def test_a_quoted_default_is_the_codes(page: str, path: str, quoted: str) -> None:
    assert repr(default_of(path)) == quoted


def test_the_shares_in_the_readme_are_the_codes() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shares = [default_of("ContextBudget.high_mark"), default_of("ContextBudget.low_mark")]
    shares += [ctxguard.TiktokenCounter.margin, ctxguard.ApproximateCounter.margin]
    assert [share for share in shares if f"{share * 100:g} %" not in readme] == []


@pytest.mark.parametrize(
    "margin", ["ApproximateCounter.margin", "TiktokenCounter.margin", "ChatTemplateCounter.margin"]
)
def test_the_margins_on_the_counting_page_are_the_codes(margin: str) -> None:
    owner, _, attribute = margin.partition(".")
    value = getattr(getattr(ctxguard, owner), attribute)
    row = next(cells for cells in rows(ROOT / "docs" / "counting.md") if cells[0] == owner)
    assert row[2] == f"{value:.0%}"


def test_the_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["reference"]()
    assert REFERENCE.read_text(encoding="utf-8") == made, "run: python docs/make_reference.py"


def test_every_public_name_is_in_the_reference() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    assert [
        name for name in ctxguard.__all__ if f"### {name}\n" not in text and f"`{name}`" not in text
    ] == []


def test_what_an_integration_exports_is_in_the_reference() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    for file in sorted((ROOT / "ctxguard" / "integrations").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                missing = [name for name in ast.literal_eval(node.value) if f"### {name}\n" not in text]
                assert missing == [], file


def test_every_failure_reason_is_on_the_errors_page() -> None:
    first = [cells[0] for cells in rows(ROOT / "docs" / "errors.md")]
    reasons = [reason.value for reason in ctxguard.FailureReason]
    assert [cell for cell in first if cell in reasons] == reasons


def test_the_tree_on_the_errors_page_is_the_codes() -> None:
    """The docstring of `ctxguard.errors` draws it; the page shows the same."""
    drawn = re.compile(r"^ *(CtxguardError$|[│├└].*$| {20,}.*$)", re.MULTILINE)
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    tree = next(body for kind, body in FENCE.findall(page) if kind == "text")
    ours = [line.strip() for line in drawn.findall(inspect.getdoc(errors) or "")]
    assert [line.strip() for line in tree.splitlines()] == ours
    for name in re.findall(r"\w+(?:Error|Warning)", tree):
        assert hasattr(errors, name) or name in (
            "OpenAIContextOverflowError",
            "ValueError",
            "BadRequestError",
        )


# Troubleshooting

# An entry is a heading with the text in back quotes; "…" stands for a value. The line below says whose it is.
ENTRY = re.compile(r"^### `(.+)`\n\n\*([^*]+)\*", re.MULTILINE)
_OURS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.CtxguardError)
}
# Helpers that make an error of ours; the position of the message among their arguments.
_HELPERS = {"_contradiction": 3, "_refused": 0, "Failure": 1, "warn": 0}
_PREFIXED = {"_contradiction"}  # these put "first argument=value " before the message


def entries() -> list[tuple[str, str]]:
    """``(text, whose)`` of every entry on the page."""
    return ENTRY.findall(TROUBLESHOOTING.read_text(encoding="utf-8"))


def template(node: ast.AST, names: dict[str, list[ast.AST]]) -> Iterator[str]:
    """The texts that an expression can make, with "…" for what is filled in."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        for left in template(node.left, names):
            for right in template(node.right, names):
                yield left + right
    elif isinstance(node, ast.IfExp):
        yield from template(node.body, names)
        yield from template(node.orelse, names)
    elif isinstance(node, ast.Name) and node.id in names:
        for value in names[node.id]:
            yield from template(value, {})
    else:
        yield "…"


def messages_of(path: Path) -> Iterator[str]:
    """Every message that a module gives to an error of ours, a failure or a warning."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        at = 0 if called in _OURS else _HELPERS.get(called)
        if at is None or len(node.args) <= at:
            continue
        prefix = f"{next(template(node.args[0], {}))}=… " if called in _PREFIXED else ""
        yield from (prefix + text for text in template(node.args[at], names))


def pieces(text: str) -> list[str]:
    return [piece for piece in (part.strip(" .,;:'\"`()") for part in text.split("…")) if len(piece) > 4]


def is_in(quote: str, message: str) -> bool:
    """Whether a quote with "…" for values can be a part of the message."""
    at = 0
    for piece in pieces(quote):
        at = message.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return bool(pieces(quote))


PACKAGE = sorted((ROOT / "ctxguard").rglob("*.py"))
TOLD = [
    (path.relative_to(ROOT).as_posix(), message)
    for path in PACKAGE
    if "testing" not in path.parts
    for message in dict.fromkeys(messages_of(path))
    if pieces(message)
]


def ours() -> list[str]:
    return [text for text, whose in entries() if "ctxguard" in whose]


@functools.cache
def everything_said() -> list[str]:
    """All messages, and all other texts in the source: some messages are put together of several."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE]
    nodes = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)
    ]
    said = [message for path in PACKAGE for message in messages_of(path)]
    return said + [text for node in nodes for text in template(node, {})]


@pytest.mark.parametrize("quote", ours())
def test_a_message_quoted_as_ours_is_in_the_source(quote: str) -> None:
    assert any(is_in(quote, message) for message in everything_said())


@pytest.mark.parametrize(("path", "message"), TOLD)
def test_a_message_of_ours_has_an_entry(path: str, message: str) -> None:
    assert any(is_in(quote, message) for quote in ours()), f"add an entry for it to {TROUBLESHOOTING.name}"


@pytest.mark.parametrize(("text", "whose"), [entry for entry in entries() if "overflow" in entry[1]])
def test_what_is_called_an_overflow_is_recognised_as_one(text: str, whose: str) -> None:
    body = {"error": {"message": text.replace("…", "20480"), "type": "BadRequestError", "code": 400}}
    verdict = classify(status=400, body=body, request=RequestFacts(max_output_tokens=16))
    assert verdict.is_overflow == ("not an overflow" not in whose)


def test_the_entries_are_sorted_by_their_text() -> None:
    def key(text: str) -> str:
        return re.sub(r"^[^a-z]+", "", text.lower().replace("…", ""))

    texts = [key(text) for text, _ in entries()]
    assert texts == sorted(texts)
    assert len(re.findall(r"^### ", prose(TROUBLESHOOTING), re.MULTILINE)) == len(texts)
