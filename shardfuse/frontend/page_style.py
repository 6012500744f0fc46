"""The look of the page of a plan: legible on a phone and a desktop, light and dark, without a network."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --ground: #fff; --panel: #f4f6f9; --line: #d4dae2;
  --kernel: #cfe3ff; --communication: #ffe0b8; --other: #e4e7ec; --io: #d9f2dd; --cut: #c2410c; --bar: #2f6fd0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --ground: #12161c; --panel: #1b212a;
  --line: #343d4a; --kernel: #1e3f6b; --communication: #6b4413; --other: #333b47; --io: #1f4a2a; --cut: #fb923c;
  --bar: #6aa3f5; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 16px; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 4px; } h2 { font-size: 1.15rem; margin: 32px 0 8px; }
p { margin: 6px 0; } .soft, caption { color: var(--soft); }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px; margin: 16px 0; }
.numbers div { background: var(--panel); border-radius: 8px; padding: 10px 12px; }
.numbers b { display: block; font-size: 1.25rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }
.wide svg { display: block; margin: 0 auto; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
th, td { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; white-space: nowrap; }
caption { text-align: left; padding: 4px 10px; }
pre { background: var(--panel); border-radius: 8px; padding: 10px; overflow-x: auto; font-size: 13px; margin: 6px 0; }
code { font-size: .9em; } details { margin: 6px 0; } summary { cursor: pointer; padding: 6px 0; }
.share { background: var(--panel); border-radius: 4px; min-width: 90px; height: 10px; margin-top: 4px; }
.share i { display: block; height: 10px; border-radius: 4px; background: var(--bar); }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; text-anchor: middle; }
svg .title { font-weight: 600; font-size: 13px; } svg .line, svg .tick { fill: var(--soft); }
svg .edge-name { fill: var(--soft); text-anchor: start; font-size: 11px; }
svg .row, svg .bar { text-anchor: start; } svg .tick { font-size: 11px; }
td code { white-space: nowrap; }
svg .edge { fill: none; stroke: var(--soft); stroke-width: 1.3; } svg .tip { fill: var(--soft); }
svg .cut { fill: none; stroke: var(--cut); stroke-width: 2; stroke-dasharray: 5 4; }
svg rect { stroke: var(--line); } svg rect.input, svg rect.output { fill: var(--io); }
svg rect.kernel { fill: var(--kernel); } svg rect.communication { fill: var(--communication); }
svg rect.other { fill: var(--other); }
.key span { display: inline-block; margin-right: 14px; white-space: nowrap; }
.key i { display: inline-block; width: 14px; height: 14px; border-radius: 3px;
  margin-right: 5px; vertical-align: -2px; }
"""
