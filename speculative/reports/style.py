"""The page's style sheet. Text colours hold 4.5 : 1 against their background, light and dark."""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1b1f24",
    "faint": "#59636e",
    "rule": "#d1d9e0",
    "accepted": "#116329",
    "rejected": "#b3261e",
    "correction": "#0b57d0",
    "bonus": "#7b3fa0",
}

DARK = {
    "paper": "#14171a",
    "ink": "#e6e8ea",
    "faint": "#a0a8b0",
    "rule": "#3a4149",
    "accepted": "#7ee2a0",
    "rejected": "#ff8f85",
    "correction": "#8ab8ff",
    "bonus": "#d9b3ff",
}


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


CSS = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
body {{ margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }}
main {{ max-width: 72rem; margin: 0 auto; padding: 1.5rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; margin-bottom: .4rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: .875rem; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3rem; }}
th, td {{ padding: .35rem .7rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }}
th {{ vertical-align: bottom; color: var(--faint); font-weight: 600; }}
td {{ white-space: nowrap; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
.notes {{ font-size: .9rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; }}
.charts {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
figure {{ margin: 0; max-width: 26rem; flex: 1 1 20rem; break-inside: avoid; }}
figcaption {{ font-size: .85rem; color: var(--faint); }}
.chart {{ width: 100%; height: auto; font: 12px system-ui, sans-serif; }}
.chart text {{ fill: var(--ink); }}
.chart .tick {{ fill: var(--faint); }}
.chart .value {{ paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }}
.chart .value.chosen {{ font-weight: 700; }}
.chart .grid {{ stroke: var(--rule); }}
.chart .one {{ stroke: var(--ink); stroke-dasharray: 5 4; }}
.chart .curve {{ fill: none; stroke: var(--correction); stroke-width: 2; }}
.chart .point {{ fill: var(--correction); }}
.chart .point.chosen {{ fill: var(--paper); stroke: var(--correction); stroke-width: 3; }}
.trace {{ font-family: ui-monospace, monospace; font-size: .875rem; padding-left: 3rem; }}
.trace li {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
.trace li::marker {{ color: var(--faint); }}
.trace li > * + * {{ border-left: 1px solid var(--rule); }}
.accepted {{ color: var(--accepted); }}
.rejected {{ color: var(--rejected); text-decoration: line-through; }}
.correction {{ color: var(--correction); font-weight: 700; }}
.bonus {{ color: var(--bonus); text-decoration: underline; font-weight: 700; }}
@media print {{
  :root {{ font-size: 10pt; }}
  body {{ font-size: 1rem; }}
  main {{ max-width: none; padding: 0; }}
  table {{ font-size: 7.5pt; }}
  th, td {{ padding: .2rem .35rem; }}
  .wide {{ overflow: visible; }}
  h2, h3, summary, caption {{ break-after: avoid; }}
  .trace li, tr {{ break-inside: avoid; }}
}}
"""
