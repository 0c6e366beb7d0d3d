"""How the page of a plan looks, in light, in dark and on paper, and the few lines that show tips without delay.

Cool colours are weights, warm ones what running them takes; hatching is room through which weights pass.
"""

from __future__ import annotations

_LIGHT = """\
--paper: #fff; --ink: #1a1d21; --soft: #5b636d; --line: #dfe3e8; --track: #f0f2f5; --code: #f5f6f8;
--embedding: #2f8f83; --block: #3f6fb0; --experts: #8a6fc0; --head: #5aa7c7; --other: #8a97a8;
--kv: #dca03a; --logits: #b5552b; --activation: #d97b45; --overhead: #b3a492; --hatch: #7f8b99;"""

_DARK = """\
--paper: #14171b; --ink: #e6e9ed; --soft: #9aa4b0; --line: #2c323a; --track: #21262d; --code: #1c2026;
--embedding: #3fa798; --block: #5b8bd0; --experts: #a288d8; --head: #6fb8d6; --other: #7a8797;
--kv: #d9a441; --logits: #c8683c; --activation: #de8a57; --overhead: #8f8374; --hatch: #8793a2;"""

STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 2.5rem 2rem 4rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; }}
h1, h2, h3, p, ul, dl, dd, pre {{ margin: 0; padding: 0; }}
h1 {{ font-size: 1.75rem; line-height: 1.2; font-weight: 650; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05rem; font-weight: 650; margin: 3rem 0 .25rem; }}
h3 {{ font-size: .95rem; font-weight: 650; }}
p {{ max-width: 60rem; text-wrap: pretty; }}
code, pre {{ font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .85rem; }}
.soft, .subject, .facts dt, .facts small {{ color: var(--soft); }}
.subject {{ margin-top: .25rem; }}
.answer {{ font-size: 1.2rem; margin-top: 1.25rem; max-width: none; }}
.facts {{ display: grid; grid-template-columns: repeat(4, 1fr); gap: 1rem 2rem; margin-top: 1.5rem;
  padding: 1rem 0; border: solid var(--line); border-width: 1px 0; }}
.facts dt {{ font-size: .8rem; }}
.facts dd {{ font-size: 1.2rem; font-weight: 600; line-height: 1.35; }}
.facts small {{ display: block; font-size: .8rem; font-weight: 400; line-height: 1.4; }}
.legend {{ display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: .75rem 0 1.25rem;
  font-size: .85rem; }}
.legend i {{ display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px;
  vertical-align: -.08rem; }}
.device {{ margin-top: 1.25rem; break-inside: avoid; }}
.device header {{ display: flex; flex-wrap: wrap; align-items: baseline; gap: 0 1rem; margin-bottom: .3rem; }}
.device header p {{ font-size: .85rem; color: var(--soft); }}
.bar, .strip {{ display: flex; overflow: hidden; background: var(--track); border-radius: 3px; }}
.bar {{ height: 2.25rem; }}
.s {{ min-width: 1px; height: 100%; }}
.bar .s {{ border-left: 1px solid color-mix(in srgb, var(--paper) 35%, transparent); }}
.bar .s.first {{ border-left-color: var(--paper); }}
.bar .s:first-child, .bar .s.thin, .bar .s.free {{ border-left: 0; }}
.embedding {{ background: var(--embedding); }} .block {{ background: var(--block); }}
.experts {{ background: var(--experts); }} .head {{ background: var(--head); }} .other {{ background: var(--other); }}
.kv {{ background: var(--kv); }} .logits {{ background: var(--logits); }}
.activation {{ background: var(--activation); }} .overhead {{ background: var(--overhead); }}
.workspace {{ background: repeating-linear-gradient(135deg, var(--hatch) 0 1.5px, transparent 1.5px 5px); }}
.legend .free {{ background: var(--track); box-shadow: inset 0 0 0 1px var(--line); }}
.labels {{ position: relative; height: 2.6rem; font-size: .75rem; line-height: 1.3; color: var(--soft); }}
.labels div, .axis div {{ position: absolute; top: .25rem; container-type: inline-size; height: 2.2rem; }}
.labels span, .axis span {{ display: block; padding-left: .3rem; border-left: 1px solid var(--line); }}
.labels b, .axis span {{ display: block; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; }}
.labels b {{ font-weight: 600; color: var(--ink); }}
@container (max-width: 2.6rem) {{ .labels span, .axis span {{ display: none; }} }}
.scale, .lanes {{ display: grid; grid-template-columns: max-content 1fr; gap: .35rem .9rem; align-items: center;
  margin-top: .9rem; font-size: .85rem; break-inside: avoid; }}
.scale {{ grid-template-columns: max-content 1fr max-content; }}
.lane-name {{ font-weight: 600; }}
.size {{ text-align: right; color: var(--soft); }}
.strip {{ height: .7rem; background: none; }}
.strip .free {{ background: var(--track); box-shadow: inset 0 0 0 1px var(--line); }}
.lane {{ position: relative; height: 1.5rem; background: var(--track); border-radius: 2px; overflow: hidden; }}
.lane .s {{ position: absolute; top: 0; }}
.lane.passed .s {{ height: 1rem; }}
.lane.passed .s.workspace {{ top: 1rem; height: .5rem; }}
.axis {{ grid-column: 2; position: relative; height: 1.6rem; font-size: .75rem; color: var(--soft); }}
.scroll {{ overflow-x: auto; margin-top: .75rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .9rem; }}
th, td {{ padding: .35rem 0 .35rem 1.5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }}
th {{ font-weight: 600; }}
thead th {{ font-size: .8rem; color: var(--soft); vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
.name {{ text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }}
td.name {{ position: relative; padding-left: 1.15rem; }}
td.name i {{ position: absolute; left: 0; top: .75rem; }}
td.name small {{ display: inline-block; margin-left: .5rem; font-size: .9em; color: var(--soft); }}
td.none {{ color: var(--soft); }}
tfoot th, tfoot td {{ border-bottom: 0; font-weight: 600; }}
td i {{ width: .65rem; height: .65rem; border-radius: 2px; }}
.group th {{ padding-top: 1.1rem; }}
.notes {{ padding-left: 1.1rem; max-width: 60rem; }}
.notes li {{ margin-top: .35rem; overflow-wrap: anywhere; }}
pre {{ margin-top: .75rem; padding: .8rem 1rem; background: var(--code); border-radius: 4px; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
.tip {{ position: fixed; z-index: 1; max-width: 22rem; padding: .4rem .6rem; border-radius: 4px; pointer-events: none;
  color: var(--paper); background: var(--ink); font-size: .8rem; white-space: pre-line; overflow-wrap: anywhere; }}
.tip[hidden] {{ display: none; }}
@media (max-width: 60rem) {{
  body {{ padding: 1.5rem 1rem 3rem; }}
  .facts {{ grid-template-columns: repeat(2, 1fr); }}
  th, td {{ padding-left: .9rem; }}
  table {{ font-size: .82rem; }}
  thead th {{ white-space: normal; }}
  td.name i {{ top: .65rem; }}
}}
@media print {{
  :root {{ color-scheme: light; font-size: 12px; {_LIGHT} }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
  body {{ padding: 0; max-width: none; font-size: .95rem; }}
  .facts {{ grid-template-columns: repeat(4, 1fr); }}
  h2 {{ margin-top: 2rem; break-after: avoid; }}
  h2 + p, .group {{ break-after: avoid; }}
  .tip {{ display: none; }}
  tr {{ break-inside: avoid; }}
  .scroll {{ overflow: visible; }}
}}
"""

SCRIPT = """
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const part of document.querySelectorAll(".bar [title], .lane [title]")) {
    part.dataset.tip = part.title;
    part.removeAttribute("title");
  }
  const hide = () => { tip.hidden = true; };
  addEventListener("pointermove", (event) => {
    const part = event.target instanceof Element && event.target.closest("[data-tip]");
    if (!part) return hide();
    tip.textContent = part.dataset.tip;
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 4)) + "px";
    tip.style.top = (event.clientY > height + 20 ? event.clientY - height - 12 : event.clientY + 16) + "px";
  });
  addEventListener("scroll", hide, { passive: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
})();
"""
