"""`report.html`: one self-contained page made from a record alone.

It holds no script and asks for no other file, so it opens offline and can be mailed; it follows
the reader's light or dark setting and prints. Colours carry no meaning alone: rejected tokens are
struck through, corrections bold, bonus tokens underlined.
"""

from __future__ import annotations

from html import escape

from etils import epath

from speculative.files import write_text_atomic
from speculative.records import Model, Record, Round, Setting, Trace
from speculative.reports.cells import Column, caveats, columns, model_text, summary
from speculative.reports.chart import gamma_chart
from speculative.reports.style import CSS

_BLANK = "\u2581"  # SentencePiece's mark for a blank
_TABLES = {"acceptance": "Acceptance and cost", "time": "Time", "quality": "Quality"}


def write_page(record: Record, path: epath.PathLike) -> epath.Path:
    """Writes the page whole (see `write_text_atomic`); returns its path.

    Raises:
      OSError: the file system refuses the file.
    """
    return write_text_atomic(path, to_html(record))


def to_html(record: Record) -> str:
    """The page: heading, tables, search for gamma, traces, provenance. All text is escaped."""
    tasks = ", ".join(dict.fromkeys(s.task for s in record.settings))
    title = f"Speculative decoding: {record.target.name}, {tasks}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(summary(record))}. Run <q>{escape(record.run_mode)}</q> of "
        f"<time>{escape(record.created)}</time>.</p>",
        *_tables(record),
        *_charts(record),
        *_traces(record),
        *_provenance(record),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title>",
            f"<style>{CSS}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _tables(record: Record) -> list[str]:
    shown = columns(record)
    key = [column for column in shown if column.group == "key"]
    lines = ["<h2>Results</h2>"]
    for group, heading in _TABLES.items():
        figures = (column for column in shown if column.group == group)
        lines.append(_table(heading, [*key, *figures]))
    notes = caveats(record)
    if notes:
        lines.append("<ul class=notes>")
        lines += [f"<li>{escape(note)}</li>" for note in notes]
        lines.append("</ul>")
    lines.append(
        "<details><summary>What the columns mean</summary><dl>"
        + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _GLOSSARY)
        + "</dl></details>"
    )
    return lines


def _table(heading: str, shown: list[Column]) -> str:
    def cell(column: Column, i: int) -> str:
        lines = "<br>".join(escape(line) for line in column.cells[i])
        return f"<td{_numeric(column)}>{lines}</td>"

    head = "".join(
        f'<th scope="col"{_numeric(column)}>{escape(column.header.replace("- ", ""))}</th>'
        for column in shown
    )
    rows = [
        "<tr>" + "".join(cell(column, i) for column in shown) + "</tr>"
        for i in range(len(shown[0].cells))
    ]
    return "\n".join(
        [
            f'<div class="wide" tabindex="0" role="region" aria-label="{escape(heading)}"><table>',
            f"<caption>{escape(heading)}</caption>",
            f"<thead><tr>{head}</tr></thead>",
            "<tbody>",
            *rows,
            "</tbody></table></div>",
        ]
    )


def _numeric(column: Column) -> str:
    return ' class="number"' if column.numeric else ""


def _name(setting: Setting) -> str:
    return (
        f"{setting.task}, draft {setting.draft.name}, T={setting.temperature:g}, "
        f"{setting.verifier} verification"
    )


def _charts(record: Record) -> list[str]:
    searched = [(s, s.gamma_search) for s in record.settings if s.gamma_search]
    if not searched:
        return []
    lines = [
        "<h2>Speed-up by gamma</h2>",
        "<p>Measured in the search for gamma; the ringed point is the gamma of the tables, the "
        "dashed line the speed of autoregressive decoding.</p>",
        '<div class="charts">',
    ]
    for s, search in searched:
        name = f"{_name(s)} (split {search.split})"
        chart = gamma_chart(search, s.gamma, f"Speed-up by gamma: {name}")
        lines.append(f"<figure>\n{chart}\n<figcaption>{escape(name)}</figcaption></figure>")
    return [*lines, "</div>"]


def _traces(record: Record) -> list[str]:
    traced = [(s, s.examples) for s in record.settings if s.examples]
    if not traced:
        return []
    lines = [
        "<h2>Traces</h2>",
        "<p>One line for each run of the target, after figure 1 of the paper, with the tokens that "
        "the run added. Legend: "
        '<span class="accepted">accepted draft</span>, '
        '<s class="rejected">rejected draft</s>, '
        '<b class="correction">correction</b> (the target\'s token in place of a rejected one), '
        '<u class="bonus">bonus</u> (the target\'s token after a block accepted whole). '
        "Struck-out drafts behind the first were dropped without being judged.</p>",
    ]
    for s, examples in traced:
        lines.append(f"<h3>{escape(_name(s))}, gamma={s.gamma}</h3>")
        for trace in examples:
            lines += _trace(trace)
    return lines


def _trace(trace: Trace) -> list[str]:
    emitted = sum(len(r.accepted) + (r.kind != "end") for r in trace.rounds)
    return [
        f"<details open><summary>Example {trace.example_id}: {emitted} tokens in "
        f"{len(trace.rounds)} target runs</summary>",
        f"<p><b>Input</b> {escape(trace.input_text)}</p>",
        '<ol class="trace">',
        *(f"<li>{_round(r)}</li>" for r in trace.rounds),
        "</ol>",
        f"<p><b>Output</b> {escape(trace.output_text)}</p>",
        "</details>",
    ]


def _round(r: Round) -> str:
    html = _tokens("span", "accepted", r.accepted) + _tokens("s", "rejected", r.rejected)
    if r.kind == "end":
        return html
    tag = "u" if r.kind == "bonus" else "b"
    return html + _tokens(tag, r.kind, (r.next,))


def _tokens(tag: str, kind: str, tokens: tuple[str, ...]) -> str:
    return "".join(f'<{tag} class="{kind}">{_token(token)}</{tag}>' for token in tokens)


def _token(token: str) -> str:
    """A token as text: SentencePiece's blank as a blank, line breaks as a visible sign."""
    shown = token.replace(_BLANK, " ").replace("\r", "").replace("\n", "\N{RETURN SYMBOL}")
    return escape(shown) or "\N{EMPTY SET}"


def _provenance(record: Record) -> list[str]:
    p = record.provenance
    drafts = dict.fromkeys(s.draft for s in record.settings)
    rows = [("target", _model(record.target))]
    rows += [("draft", _model(draft)) for draft in drafts]
    rows += [
        ("command", p.command),
        ("commit", p.commit or "not from a checkout"),
        ("devices", ", ".join(p.devices) or "not named"),
        ("host", f"{p.host.cpu}, {p.host.cores} cores"),
        ("seed", str(p.seed)),
        ("configuration, SHA-256", p.config_hash or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in p.versions.items())),
    ]
    memory = dict.fromkeys(_memory(s) for s in record.settings)
    rows += [("memory", text) for text in memory if text]
    lines = [f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in rows]
    return ["<h2>Provenance</h2>", "<dl>", *lines, "</dl>"]


def _memory(setting: Setting) -> str:
    m = setting.memory
    if m is None:
        return ""
    parts = []
    if m.bandwidth_gb_s is not None:
        parts.append(f"{m.bandwidth_gb_s:.1f} GB/s measured read bandwidth")
    if m.baseline_share is not None:
        parts.append(f"autoregressive step at {m.baseline_share:.0%} of it")
    if m.bytes_per_target_step is not None:
        parts.append(f"{m.bytes_per_target_step / 1e6:.0f} MB read per target step")
    return ", ".join(parts)


def _model(model: Model) -> str:
    checkpoint = f", {model.checkpoint}" if model.checkpoint else ""
    return f"{model_text(model)}{checkpoint}"


_GLOSSARY = (
    ("T, gamma", "Temperature (0 is argmax); drafted tokens per target run."),
    (
        "alpha",
        "Mean of sum min(p, q) over the tokens that the target generated, with its interval over "
        "resampled examples (the paper's definition).",
    ),
    ("tokens per target run", "Emitted tokens over target runs, measured in the decode."),
    (
        "accepted of drafted",
        "Accepted over drafted tokens. Below alpha for gamma above 1: every draft behind a "
        "rejection counts as drafted.",
    ),
    ("c", "Time of a draft step over time of a target step."),
    ("verify ratio", "Time of a target run over gamma + 1 positions over that of one position."),
    ("identical outputs", "Outputs equal to the baseline's token for token, of those compared."),
    (
        "ms/token, speed-up",
        "Medians of interleaved repeats after warm-up, encoders included, compilation not; the "
        "speed-up's interval resamples pairs of repeats.",
    ),
    ("predicted iid", "Theorem 3.8 of the paper with the measured verify ratio, from alpha."),
    (
        "predicted parts",
        "Baseline's time over encoders + target runs x (gamma x draft step + verify run).",
    ),
)
