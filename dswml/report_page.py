"""The page of a report: one HTML file without scripts and without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Section", "counted", "facts", "page", "table", "tiles"]

#: No script runs and nothing is fetched, whatever is in the texts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

#: Characters of a cell from which on it is a sentence rather than a figure.
LONGEST_FIGURE = 28

_STYLE = """
:root{--paper:#fff;--ink:#1c2430;--soft:#566273;--rule:#dde3ea;--box:#f6f8fa;--link:#0b57b0;
--shade:#0003;--c0:#6b7686;--c1:#1f6fd6;--c2:#c65d00;--c3:#16805a;--c4:#9438a8;color-scheme:light}
@media screen and (prefers-color-scheme:dark){:root{
--paper:#12171e;--ink:#e8edf3;--soft:#a3afbf;--rule:#2d3744;--box:#1a212b;--link:#82b6ff;
--shade:#fff3;--c0:#8d99a9;--c1:#6aaeff;--c2:#ffab5c;--c3:#5fd3a5;--c4:#dd9cf0;color-scheme:dark}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif;
-webkit-text-size-adjust:100%}
header,main,footer{max-width:64rem;margin:0 auto;padding:0 1rem}
h1{font-size:1.7rem;line-height:1.2;margin:1.6rem 0 .2rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.4rem 0 .6rem;padding-top:.8rem;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:0 0 .3rem}
p{max-width:44rem;margin:.4rem 0 .8rem;text-wrap:pretty}
.soft,figcaption,footer{color:var(--soft);font-size:.9rem}
a{color:var(--link)}
nav ul,.legend{list-style:none;margin:0;padding:0;display:flex;flex-wrap:wrap}
nav ul{gap:.2rem 1rem;font-size:.9rem;margin-top:.8rem}
.tiles{list-style:none;padding:0;display:grid;gap:.7rem;margin:1.2rem 0;
grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr))}
.tiles li{background:var(--box);border:1px solid var(--rule);border-radius:.5rem;
padding:.6rem .8rem}
.tiles b{display:block;font-size:1.25rem;line-height:1.3;font-weight:600;white-space:nowrap}
.tiles span{color:var(--soft);font-size:.85rem}
.charts{display:grid;gap:1.6rem 2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
figure{margin:0;max-width:34rem;min-width:0;break-inside:avoid}
figcaption{margin-top:.3rem}
.chart{display:block;width:100%;height:auto}
.legend{gap:.1rem 1rem;font-size:.85rem;margin-top:.2rem}
.legend li{display:flex;align-items:center;gap:.4rem}
.legend svg{width:1.7rem;height:1.05rem;flex:none}
text{fill:var(--soft);font:12px system-ui,sans-serif}
.name{fill:var(--ink)}
.end{text-anchor:end}
.middle{text-anchor:middle}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}
.grid{stroke:var(--rule);fill:none}
.axis{stroke:var(--soft);fill:none}
.line{stroke:var(--c);stroke-width:2;fill:none;stroke-linejoin:round}
.dash{stroke:var(--c);stroke-width:1.5;stroke-dasharray:5 4;fill:none}
.line.hollow{stroke-dasharray:2 3}
.bar{stroke:var(--c);stroke-width:1.4;fill:none;pointer-events:none}
.mark{fill:var(--c);stroke:var(--paper);stroke-width:.8}
.mark.hollow{fill:var(--paper);stroke:var(--c);stroke-width:1.6}
.mark.faint{fill-opacity:.55;stroke:none}
.mark.large{fill:none;stroke:var(--c);stroke-width:2}
.mark:hover{stroke:var(--ink);stroke-width:2}
.scroll{overflow-x:auto;margin:.6rem 0 1.2rem;
background:linear-gradient(90deg,var(--paper) 30%,transparent) 0/2.5rem 100%,
linear-gradient(270deg,var(--paper) 30%,transparent) 100%/2.5rem 100%,
linear-gradient(90deg,var(--shade),transparent) 0/.8rem 100%,
linear-gradient(270deg,var(--shade),transparent) 100%/.8rem 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
.tables{display:grid;gap:0 2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));
align-items:start}
.tables>*{min-width:0}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.2rem 0 .4rem}
th,td{padding:.3rem .7rem .3rem 0;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap;
vertical-align:top}
th:first-child{text-align:left;font-weight:500}
thead th{color:var(--soft);font-weight:500;font-size:.85rem}
.facts{margin:.6rem 0 1.2rem}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.facts th{color:var(--soft);font-weight:400}
.long{white-space:normal;overflow-wrap:anywhere;min-width:8rem;max-width:18rem}
td.long,thead .long:not(:first-child){text-align:left;min-width:14rem;max-width:26rem}
summary{cursor:pointer;color:var(--link);margin:.8rem 0 .2rem}
footer{margin-top:2.4rem;padding-bottom:2rem}
@media (max-width:30rem){text{font-size:13.5px}h1{font-size:1.45rem}}
@media (min-width:50rem){.charts figure:only-child{max-width:none;display:grid;column-gap:2rem;
grid-template:auto auto 1fr/1fr 1fr}.charts :only-child>h3{grid-column:1/-1}
.charts :only-child>svg{grid-row:2/4}.charts :only-child>figcaption:last-child{grid-column:2}}
@media print{@page{margin:14mm}html{font-size:10pt}nav,summary{display:none}
section{break-inside:auto}h2,h3{break-after:avoid}tr,.tiles li{break-inside:avoid}
.scroll{overflow:visible;background:none}.tables .scroll{break-inside:avoid}.long{max-width:none}
td:last-child{white-space:normal}
.charts,.tables{grid-template-columns:1fr 1fr}.tables:has(.long){grid-template-columns:1fr}
details::details-content{content-visibility:visible;height:auto}}
"""


@dataclass(frozen=True)
class Section:
    """One part of the page: its anchor, its heading, and its content as HTML."""

    key: str
    title: str
    content: str


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and what there are so many of.

    Examples
    --------
    >>> counted(1, "pass", "passes"), counted(2000, "row")
    ('1 pass', '2,000 rows')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def page(title: str, lead: str, top: str, sections: Sequence[Section], notes: Sequence[str]) -> str:
    """Return the whole page; ``top`` and the sections are HTML, all else is text.

    Examples
    --------
    >>> "<h1>a &lt; b</h1>" in page("a < b", "", "", [], [])
    True
    """
    links = "".join(f'<li><a href="#{each.key}">{escape(each.title)}</a></li>' for each in sections)
    parts = "".join(
        f'<section id="{each.key}"><h2>{escape(each.title)}</h2>{each.content}</section>' for each in sections
    )
    left_out = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f'<body><header><h1>{escape(title)}</h1><p class="soft">{escape(lead)}</p>{top}'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n'
        f"<main>{parts}</main>\n<footer>{left_out}</footer></body></html>\n"
    )


def table(caption: str, header: Sequence[str], lines: Sequence[Sequence[str]], *, long: bool = False) -> str:
    """Return a table that scrolls in a box of its own; the first cell of a line names it.

    In a ``long`` one names are broken into lines, and so are columns that hold sentences; whichever way
    they are written, their neighbours stay in place.

    Examples
    --------
    >>> wide = table("", ["a", "b"], [["c", "some words that are a sentence"]], long=True)
    >>> '<td class="long"><bdi>some words' in wide
    True
    """
    wide = [long and any(len(line[at]) > LONGEST_FIGURE for line in lines) for at in range(len(header))]
    wide[0] = long

    def row(cells: Sequence[str], first: str, other: str) -> str:
        out = []
        for number, (cell, broken) in enumerate(zip(cells, wide, strict=True)):
            kind = other if number else first
            breaks = ' class="long"' if broken else ""
            content = f"<bdi>{escape(cell)}</bdi>" if broken else escape(cell)
            out.append(f"<{kind}{breaks}>{content}</{kind[:2]}>")
        return "".join(out)

    titles = row(header, 'th scope="col"', 'th scope="col"')
    rows = "".join("<tr>" + row(line, 'th scope="row"', "td") + "</tr>" for line in lines)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def facts(caption: str, lines: Sequence[tuple[str, str]]) -> str:
    """Return names and what is said of them; the caption is told, not shown."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in lines
    )
    return f'<table class="facts" aria-label="{escape(caption)}"><tbody>{rows}</tbody></table>'


def tiles(figures: Sequence[tuple[str, str]]) -> str:
    """Return figures to be seen first, and what they are."""
    return (
        '<ul class="tiles">'
        + "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for name, value in figures)
        + "</ul>"
    )
