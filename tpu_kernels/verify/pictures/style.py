"""The page's look: one style sheet for light and dark, narrow and wide, screen and paper."""

from __future__ import annotations

CSS = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1d2129;--soft:#5c6470;--line:#dfe2e7;--track:#eef0f3;
--input:#3a76c4;--output:#1f9a84;--scratch:#c98a1b;--spill:#cc3d4a;--other:#8a919c;
--good:#1b7f4b;--bad:#b3261e;--accent:#3a76c4;--wait:#e7e3da;--hatch:#9a917e}
@media (prefers-color-scheme:dark){:root{--bg:#15171b;--card:#1c1f25;--ink:#e7e9ee;--soft:#a2aab6;
--line:#343a44;--track:#272b33;--input:#6ea8ee;--output:#4cc4ab;--scratch:#e3b04b;--spill:#f07c86;
--other:#8b94a1;--good:#62cf95;--bad:#ff8f87;--accent:#6ea8ee;--wait:#35322b;--hatch:#857c69}}
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);line-height:1.5;
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}
h2{font-size:1.3rem;margin:2.5rem 0 .5rem;overflow-wrap:anywhere}
h3{font-size:1.02rem;margin:1.8rem 0 .3rem}
p,ul,ol{margin:.4rem 0;overflow-wrap:anywhere}
.failure p{white-space:pre-line}
.soft,figcaption{color:var(--soft);font-size:.9rem}
nav ul{padding-left:1.2rem}
a{color:var(--accent)}
code,pre{font:.88em/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
pre{background:var(--track);padding:.8rem;border-radius:.5rem;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:24rem}
figure{margin:0}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.6rem;background:var(--card)}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--accent);
outline-offset:2px}
.chart{padding:.6rem}
.grid{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
.grid ol{padding:0 1rem .6rem 2rem;margin:0;font-size:.86rem;color:var(--soft)}
.grid li{overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.45rem .7rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;
vertical-align:top}
tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:600;font-size:.84rem}
th:first-child,.text{text-align:left}
td.long{white-space:normal;min-width:15rem;text-align:left}
tbody th{font-weight:600}
.ok{color:var(--good);font-weight:600}
.no{color:var(--bad);font-weight:600}
.bar{display:block;height:.5rem;border-radius:.25rem;background:var(--track);min-width:5rem;
margin-top:.25rem}
.bar>i{display:block;height:100%;border-radius:.25rem;background:var(--accent)}
.failure{border-left:4px solid var(--bad);padding:.2rem 0 .2rem 1rem;margin:1rem 0}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.4rem 0;
font-size:.88rem;color:var(--soft)}
.legend i{display:inline-block;width:.85em;height:.85em;border-radius:.2em;margin-right:.4em;
vertical-align:-.08em}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--soft);font-size:.9rem}
details>.scroll{margin-top:.5rem}
.chart svg{display:block;width:100%;height:auto;max-width:calc(var(--width)*1.35);
min-width:calc(var(--width)*.8);font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg text{fill:var(--ink)}
svg .tick,svg .note{fill:var(--soft)}
svg .tick{font-size:11px}
svg .strong{font-weight:650;font-size:13px}
svg .grid{stroke:var(--line);stroke-width:1;fill:none}
svg .axis{stroke:var(--soft);stroke-width:1}
svg .roof{stroke:var(--ink);stroke-width:2;fill:none}
svg .roof.thin{stroke:var(--soft);stroke-width:1.3;stroke-dasharray:5 4}
svg .gap{stroke:var(--accent);stroke-width:1.3;stroke-dasharray:2 3}
svg .point{fill:var(--accent);stroke:var(--card);stroke-width:1.5}
svg .point.free{fill:var(--card);stroke:var(--accent);stroke-width:2.5}
svg .track{fill:var(--track)}
svg .limit{stroke:var(--ink);stroke-width:2}
svg .hatch{fill:url(#hatch)}
#hatch path{stroke:var(--hatch);stroke-width:1.3}
svg .compute{fill:var(--accent)}
svg .wait{fill:var(--wait)}
svg .read{fill:var(--output);stroke:var(--output)}
svg .write{fill:var(--scratch);stroke:var(--scratch)}
svg .copy{stroke:none}
svg .queue{stroke-width:1.2;stroke-dasharray:1 2}
.input{fill:var(--input);background:var(--input)}
.output{fill:var(--output);background:var(--output)}
.scratch{fill:var(--scratch);background:var(--scratch)}
.spill{fill:var(--spill);background:var(--spill)}
.other,.part-other{fill:var(--other);background:var(--other)}
.part-pallas{fill:var(--input);background:var(--input)}
.part-xla{fill:var(--scratch);background:var(--scratch)}
.part-copies{fill:var(--output);background:var(--output)}
.swatch-wait{background:repeating-linear-gradient(45deg,var(--wait) 0 3px,var(--hatch) 3px 4px)}
.swatch-compute{background:var(--accent)}
@media print{main{max-width:none}.scroll{overflow:visible}details{display:none}}
"""
"""The style sheet."""

HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V5"/></pattern></defs></svg>'
)
"""Defines the pattern that waits and padding are filled with."""
