"""What the README and the pages under docs/ say, held to what is there."""

import contextlib
import dataclasses
import pathlib
import re
import shlex
import typing

import jax.numpy as jnp
import pytest

from speculative import main as main_module
from speculative import records
from speculative.types import Context

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
# Folders of the checkout; what a run writes (`runs/...`) is there only after it.
FOLDERS = ("speculative", "configs", "scripts", "docs", "tests", "experiments", "notebooks")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[page], re.DOTALL | re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """(page, command) of every `python -m speculative.main` in a block, lines joined."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page, line) for line in lines if "speculative.main" in line]
    return found


def run(code: str, names: dict) -> None:
    exec(compile(code, "<documentation>", "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)\)", TEXTS[page])
    here = (ROOT / page).parent
    missing = [t for t in targets if "://" not in t and not (here / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_paths_are_there(page):
    named = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./*-]*\w", TEXTS[page])
    missing = [path for path in named if not list(ROOT.glob(path))]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_flags_are_in_the_help(page):
    text = main_module._help(main_module._flags())
    flags = set(re.findall(r"(?<![\w-])--([a-z]\w*)", TEXTS[page])) - {"gin"}
    # absl's logging flags are in the help as a group.
    missing = {f for f in flags if f"--{f}" not in text and f not in main_module._flags()}
    assert not missing
    assert "--gin.NAME=VALUE" in text


def test_commands_are_accepted(capsys, monkeypatch):
    """Every command, with --dry_run behind it: flags, gin files, macros and values."""
    monkeypatch.chdir(ROOT)
    assert len(commands()) >= 4
    for page, command in commands():
        words = shlex.split(command, comments=True)
        assert words[:3] == ["python", "-m", "speculative.main"], command
        code = main_module.main([*words[3:], "--dry_run"])
        assert code == 0, f"{page}: {command}\n{capsys.readouterr().err}"


def test_scripts_of_the_readme_are_there():
    scripts = re.findall(r"^bash (\S+)", "\n".join(blocks("README.md", "bash")), re.MULTILINE)
    assert scripts == ["scripts/quickstart.sh", "scripts/test.sh"]
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_copying_draft_is_the_same_on_both_pages():
    marked = r"<!-- copy draft -->\n(.*?)<!-- end -->"
    one, other = (re.findall(marked, TEXTS[p], re.DOTALL) for p in ("README.md", "docs/drafts.md"))
    assert len(one) == 1
    assert one == other


def test_blocks_of_the_drafts_page_run():
    """The draft's output has the target's law, summed exactly."""
    names = {"__name__": "documentation"}
    for code in blocks("docs/drafts.md", "python"):
        run(code, names)
    assert len(names["law"]) > 10


def test_the_copying_draft_copies():
    """Its proposals: from the input's beginning, then what follows the nearest like token."""
    names = {"__name__": "documentation"}
    run(blocks("docs/drafts.md", "python")[0], names)
    inputs = jnp.asarray([[5, 6, 7, 1, 0, 0], [5, 6, 5, 8, 1, 0], [5, 6, 7, 1, 0, 0]], jnp.int32)
    tokens = jnp.asarray([[0, 0, 0, 0], [0, 9, 9, 5], [0, 9, 0, 0]], jnp.int32)
    lengths = jnp.asarray([0, 3, 1], jnp.int32)
    context = Context(tokens, lengths, lengths >= 0, inputs, None)
    proposal, _ = names["CopyDraft"]().propose(None, None, context, None, 3, None)
    assert proposal.length.tolist() == [3, 2, 0]
    assert proposal.tokens[0].tolist() == [5, 6, 7]
    assert proposal.tokens[1, :2].tolist() == [8, 1]


def test_blocks_of_the_readme_run():
    """The Python door, and the copying draft, on the shipped pair."""
    names = {"__name__": "documentation"}
    with contextlib.redirect_stdout(None):
        for code in blocks("README.md", "python"):
            run(code, names)
    assert names["output"].statistics.proposed.sum() > 0
    assert names["fast"].target_runs < names["plain"].target_runs


def test_every_field_of_a_record_is_named():
    """docs/running.md lists the schema."""
    seen, queue = set(), [records.Record]
    while queue:
        cls = queue.pop()
        if cls in seen:
            continue
        seen.add(cls)
        for hint in typing.get_type_hints(cls).values():
            queue += [t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)]
            inner = [a for t in typing.get_args(hint) for a in typing.get_args(t)]
            queue += [t for t in inner if dataclasses.is_dataclass(t)]
    named = set(re.findall(r"`(\w+)`", TEXTS["docs/running.md"]))
    fields = {(c.__name__, f.name) for c in seen for f in dataclasses.fields(c)}
    missing = {field for field in fields if field[1] not in named}
    assert records.Trace in seen
    assert not missing
