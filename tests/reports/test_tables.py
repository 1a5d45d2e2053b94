"""The terminal and Markdown tables against golden text, and what must hold at any width."""

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from speculative import records
from speculative.reports import cells, tables

DATA = Path(__file__).parent / "data"


@pytest.fixture
def record():
    return records.read_record(DATA / "record_v1.json")


def changed(record, **fields):
    """The record with the fields of its first setting changed, and no other setting."""
    setting = dataclasses.replace(record.settings[0], **fields)
    return dataclasses.replace(record, settings=(setting,))


@pytest.mark.parametrize("width", [240, 120, 80])
def test_golden_text(record, width):
    golden = (DATA / f"table_{width}.txt").read_text(encoding="utf-8")
    assert tables.to_text(record, width) == golden


def test_golden_markdown(record):
    assert tables.to_markdown(record) == (DATA / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [240, 180, 120, 100, 80, 60, 40, 20])
def test_no_number_is_cut_at_any_width(record, width):
    text = tables.to_text(record, width)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    words = text.split()
    for column in cells.columns(record):
        for cell in column.cells:
            for line in cell:
                for word in line.split():
                    assert word in words or f"{column.header}={word}" in words


@pytest.mark.parametrize(("width", "count"), [(240, 1), (120, 2), (80, 3)])
def test_number_of_stacked_tables(record, width, count):
    text = tables.to_text(record, width)
    assert len(re.findall(r"^\u2500+$", text, re.MULTILINE)) == count
    assert max(map(len, text.splitlines())) <= width


def test_a_long_name_does_not_cut_the_numbers(record):
    text = tables.to_text(changed(record, task="t" * 90), 80)
    assert "t" * 90 in text and "[0.791, 0.808]" in text and "[2.61, 2.78]" in text


def test_figures_that_were_not_taken_are_dashes(record):
    empty = {f.name: None for f in dataclasses.fields(records.Setting) if f.default is None}
    assert tables.to_markdown(changed(record, **empty)).splitlines()[-1] == (
        "| translate\\_ende | t5\\_example\\_small | 0 | 5 |" + " - |" * 13
    )


def test_columns_that_differ_between_settings_are_shown(record):
    lossy = dataclasses.replace(
        record.settings[0],
        verifier="lenient",
        exact=False,
        total_variation=0.0667,
        top_k=40,
        batch_size=8,
    )
    text = tables.to_markdown(dataclasses.replace(record, settings=(record.settings[0], lossy)))
    assert "| verifier | filter | batch |" in text
    assert "| lenient (lossy) | top-k 40 | 8 |" in text
    assert "lenient is lossy (total variation 0.0667)" in text
    assert "dtype float32, precision highest" in text.splitlines()[0]


def test_caveats(record):
    same = records.IdenticalOutputs(128, 126, 1)
    assert any(
        "2 of 128 outputs differ" in line and "1 of them from a near-tie" in line
        for line in cells.caveats(changed(record, identical_outputs=same))
    )
    few = dataclasses.replace(record.settings[0].walltime, examples=10)
    assert any(
        "timed on 10 examples" in line for line in cells.caveats(changed(record, walltime=few))
    )
    assert cells.caveats(changed(record)) == []


def test_markup_in_names_is_text(record):
    record = changed(record, task="[red]a|b[/red]")
    assert "[red]a|b[/red]" in tables.to_text(record)
    assert "[red]a\\|b[/red]" in tables.to_markdown(record)


def test_prints_to_the_console_given(record):
    console = Console(file=io.StringIO(), width=80)
    tables.print_tables(record, console)
    assert "2.70x" in console.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(912, "912"), (1000, "1k"), (76_961_152, "77M"), (247_577_856, "248M"), (11.3e9, "11.3B")],
)
def test_counts(count, text):
    assert cells.count_text(int(count)) == text
