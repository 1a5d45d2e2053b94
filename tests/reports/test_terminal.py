import dataclasses
import io

from rich.console import Console

from speculative.records import Round, Trace, read_record
from speculative.reports import terminal


def shown(record, **how):
    text = io.StringIO()
    terminal.print_traces(record, Console(file=text, width=100, **how))
    return text.getvalue()


def with_trace(record, rounds, output="out"):
    trace = Trace(example_id=3, input_text="in [bold]", output_text=output, rounds=rounds)
    setting = dataclasses.replace(record.settings[0], examples=(trace,))
    return dataclasses.replace(record, settings=(setting,))


def test_a_round_is_a_line_and_markup_in_tokens_is_text():
    record = read_record("tests/reports/data/record_v1.json")
    rounds = (
        Round(("▁a", "b"), ("[red]",), "▁c", "correction"),
        Round(("▁d",), (), "e", "bonus"),
        Round(("f",), ("g",), "", "end"),
    )
    lines = shown(with_trace(record, rounds)).splitlines()
    assert "input   in [bold]" in lines
    assert "         ab[red] c" in lines
    assert "         de" in lines
    assert "        fg" in lines


def test_kinds_differ_in_colour_and_in_form():
    record = read_record("tests/reports/data/record_v1.json")
    rounds = (Round(("a",), ("b",), "c", "correction"),)
    text = shown(with_trace(record, rounds), force_terminal=True, color_system="standard")
    assert "\x1b[32ma" in text
    assert "\x1b[9;31mb" in text
    assert "\x1b[1;34mc" in text


def test_nothing_without_traces():
    record = read_record("tests/reports/data/record_v1.json")
    setting = dataclasses.replace(record.settings[0], examples=None)
    assert shown(dataclasses.replace(record, settings=(setting,))) == ""
