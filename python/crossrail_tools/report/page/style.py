"""The looks of a page. Colours are after Okabe and Ito, which colour-blind readers tell apart, darkened or lightened to
contrast with the ground; each series also has a shape and a dash pattern of its own. What each colour means: `draw`."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#f7f7f5;--panel:#fff;--ink:#1b1e21;--mut:#5a6169;--line:#dfe0dc;--grid:#e9eae7;
--grid2:#f2f3f0;--bar:#f0f1ee;--link:#00568c;--good:#0b6b4c;--bad:#b04a00;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0528f;--c4:#9a6b00;--c5:#3f9fd6;--c6:#6b4fbb;--c7:#70777f;
--q0:#eef4f9;--q1:#d0e3f1;--q2:#a9cde6;--q3:#78b0d6;--q4:#448fc1;--q5:#1c6da6;--q6:#084b7f}
@media (prefers-color-scheme:dark){:root{--bg:#121518;--panel:#1a1e22;--ink:#e6e8ea;--mut:#9ba4ad;--line:#2e343a;
--grid:#2a3036;--grid2:#22272c;--bar:#242a30;--link:#7cc0f0;--good:#4fd0a0;--bad:#ff9d5c;
--c0:#56b4e9;--c1:#ff8c42;--c2:#2fd09b;--c3:#e58fc4;--c4:#e8b93a;--c5:#9ad8ff;--c6:#b3a0f5;--c7:#98a1aa;
--q0:#1d2a35;--q1:#1f3c52;--q2:#235474;--q3:#2e7099;--q4:#4a90bd;--q5:#7bb4da;--q6:#b8dcf5}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",
"Liberation Sans",Arial,sans-serif;font-variant-numeric:tabular-nums}
.page{max-width:1560px;margin:0 auto;padding:clamp(14px,2.4vw,34px)}
a{color:var(--link);text-underline-offset:2px}
:focus-visible{outline:2px solid var(--link);outline-offset:2px;border-radius:3px}
.skip{position:absolute;left:-999px}.skip:focus{left:8px;top:8px;background:var(--panel);padding:6px 10px}
h1{font-size:24px;line-height:1.25;font-weight:650;letter-spacing:-.01em;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:17px;font-weight:650;margin:0;letter-spacing:-.005em}
h3{font-size:13.5px;font-weight:600;line-height:1.35;margin:0;overflow-wrap:anywhere}
.sub,.intro,.note{color:var(--mut);margin:2px 0 0;font-size:12.5px;line-height:1.45;overflow-wrap:anywhere}
.intro{font-size:13px;max-width:84ch}
dl.facts{display:flex;flex-wrap:wrap;gap:2px 22px;margin:8px 0 0;font-size:12.5px}
dl.facts div{display:flex;gap:6px;min-width:0}dl.facts dt{color:var(--mut);flex:none}
dl.facts dd{margin:0;overflow-wrap:anywhere;min-width:0}
nav{margin:16px 0 0;border-top:1px solid var(--line);border-bottom:1px solid var(--line);padding:7px 0}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:2px 20px;margin:0;padding:0;font-size:13px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,176px),1fr));gap:10px;
margin:18px 0 0;padding:0;list-style:none}
.tiles li{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:10px 12px;min-width:0}
.tiles .n{color:var(--mut);font-size:12px;display:block}
.tiles .x{font-size:22px;font-weight:620;letter-spacing:-.01em;line-height:1.3}
.tiles .u{font-size:13px;color:var(--mut)}
.tiles .o{display:block;font-size:12px;color:var(--mut);overflow-wrap:anywhere}
section{margin:30px 0 0}
.head{border-bottom:1px solid var(--line);padding-bottom:6px;margin-bottom:12px}
.grid{columns:372px;column-gap:14px}.grid figure{break-inside:avoid;margin-bottom:14px}.n1{columns:auto}
.n2,.n4{columns:2 372px}
.n3{columns:auto;display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,372px),1fr));gap:0 14px}
@media (min-width:900px){.n1 figure{display:grid;grid-template-columns:minmax(0,560px) minmax(0,1fr);gap:0 26px}
.n1 figcaption{grid-column:1/-1}}
figure,.card{background:var(--panel);border:1px solid var(--line);border-radius:6px;margin:0;padding:14px 16px 12px;
min-width:0}
.card{margin-top:14px}.grid+.card{margin-top:0}
figcaption{margin-bottom:8px}
svg{display:block;width:100%;height:auto;max-width:560px;margin:6px auto 0;font-size:12px}
svg text{fill:var(--ink)}svg .tk{fill:var(--mut);font-size:11px}svg .ax{fill:var(--mut);font-size:11px}
svg .v{font-weight:600}svg .gh{font-weight:600;fill:var(--mut)}
svg .hl{paint-order:stroke;stroke:var(--panel);stroke-width:4px;stroke-linejoin:round}
.g{stroke:var(--grid);fill:none}.gm{stroke:var(--grid2);fill:none}.g1{stroke:var(--mut);fill:none}
.ref{stroke:var(--mut);stroke-dasharray:2 3;fill:none}
.s0{color:var(--c0)}.s1{color:var(--c1)}.s2{color:var(--c2)}.s3{color:var(--c3)}.s4{color:var(--c4)}.s5{color:var(--c5)}
.s6{color:var(--c6)}.s7{color:var(--c7)}.so{color:var(--q6)}.sg{color:var(--good)}.sb{color:var(--bad)}
.ln{stroke:currentColor;fill:none;stroke-width:1.9;stroke-linejoin:round}
.up{stroke:currentColor;fill:none;stroke-width:1;stroke-dasharray:1 3;opacity:.85}
.d1{stroke-dasharray:7 3}.d2{stroke-dasharray:3 2}.d3{stroke-dasharray:9 3 2 3}.d4{stroke-dasharray:12 4}
.d5{stroke-dasharray:5 5}.d6{stroke-dasharray:2 2}.d7{stroke-dasharray:10 2 2 2 2 2}
.iv{stroke:currentColor;stroke-width:2.4;fill:none}
symbol,use{overflow:visible}
.mk{fill:currentColor;stroke:transparent;stroke-width:12;paint-order:stroke}
.b{fill:currentColor}.bg{fill:var(--bar)}.wh{stroke:var(--ink);stroke-width:1.2;fill:none;opacity:.75}
.na{fill:var(--bar)}.out{stroke:var(--bad);stroke-width:2}
.q0{fill:var(--q0)}.q1{fill:var(--q1)}.q2{fill:var(--q2)}.q3{fill:var(--q3)}.q4{fill:var(--q4)}.q5{fill:var(--q5)}
.q6{fill:var(--q6)}
svg .qt0,svg .qt1,svg .qt2{fill:#10181f;font-size:11px}svg .qt3{fill:#0b141b;font-size:11px}
svg .qt4,svg .qt5,svg .qt6{fill:#fff;font-size:11px}
@media (prefers-color-scheme:dark){svg .qt0,svg .qt1,svg .qt2,svg .qt3{fill:#fff}
svg .qt4,svg .qt5,svg .qt6{fill:#0b141b}}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;font-size:12px}
.legend li{display:flex;align-items:center;gap:6px;min-width:0;overflow-wrap:anywhere}
.legend svg{width:26px;height:12px;margin:0;flex:none}.key{margin-top:16px}
details{margin-top:2px;font-size:12.5px}summary{cursor:pointer;color:var(--mut)}
.scroll{overflow-x:auto;margin-top:6px;max-height:460px;overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:12.5px}
caption{text-align:left;font-weight:600;padding:0 0 4px}
th,td{padding:3px 12px 3px 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:600;color:var(--mut);border-bottom-color:var(--line);position:sticky;top:0;background:var(--panel)}
tbody th{position:static;color:var(--ink);font-weight:400;border-bottom-color:var(--grid)}
.l{text-align:left}td.l,th.l{white-space:normal;min-width:8ch;overflow-wrap:break-word}
@media (max-width:480px){.scroll{max-height:none;overflow:visible}
.scroll table,.scroll tbody,.scroll tr{display:block}.scroll thead{position:absolute;left:-9999px}
.scroll tbody th{display:block;padding:10px 0 3px;font-weight:600;text-align:left;white-space:normal;
overflow-wrap:anywhere}
.scroll td,.scroll td.l{display:flex;justify-content:space-between;gap:12px;padding-right:0;min-width:0;
text-align:right;white-space:normal;overflow-wrap:anywhere}
.scroll td::before{content:attr(data-c);color:var(--mut);text-align:left;flex:0 1 auto;min-width:9ch}}
.yes{color:var(--good);font-weight:600}.no{color:var(--bad);font-weight:600}
.warn{border-left:3px solid var(--bad);padding:6px 10px;background:var(--panel);margin:14px 0 0;font-size:13px}
.notes{margin:12px 0 0;padding-left:18px;font-size:13px}.notes li{margin:3px 0;overflow-wrap:anywhere}
code{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;overflow-wrap:anywhere}
.read{min-height:1.35em;font-size:12px;line-height:1.35;color:var(--mut);margin:2px 0 0}
footer{margin:34px 0 10px;border-top:1px solid var(--line);padding-top:8px;color:var(--mut);font-size:12.5px}
@media print{body{background:#fff}figure,.card{break-inside:avoid}details,nav{display:none}}
"""

MARKERS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
    "M-3-3h6v6h-6z",
    "M0-3.9L3.7 2.8h-7.4z",
    "M0-4.2L4.2 0L0 4.2L-4.2 0z",
    "M0 3.9L3.7-2.8h-7.4z",
    "M-1.2-3.8h2.4v2.6h2.6v2.4h-2.6v2.6h-2.4v-2.6h-2.6v-2.4h2.6z",
    "M-3.4-1.2L0-3.8L3.4-1.2L2.1 3h-4.2z",
    "M-4-1.6h8v3.2h-8z",
)
"""Shapes of the points of each series, around 0."""

SCRIPT = """
for(const f of document.querySelectorAll('figure')){const p=[...f.querySelectorAll('svg title')].filter(
t=>t.parentNode.tagName!='svg'),r=f.querySelector('.read'),s=f.querySelector('.chart>svg');if(!p.length||!r||!s)continue;
let i=-1;const show=t=>{r.textContent=t};s.tabIndex=0;
s.addEventListener('keydown',e=>{const d={ArrowRight:1,ArrowDown:1,ArrowLeft:-1,ArrowUp:-1}[e.key];if(!d)return;
e.preventDefault();i=(i+d+p.length)%p.length;show(p[i].textContent)});
s.addEventListener('pointerover',e=>{const t=e.target.querySelector&&e.target!=s&&
e.target.querySelector(':scope>title');if(t)show(t.textContent)})}
"""
"""Optional: a line under each chart with the value under the pointer, or of the next point by the arrow keys."""


def symbols() -> str:
    """The shapes, to be used by number."""
    made = "".join(
        f'<symbol id="m{number}"><path class="mk" d="{path}"/></symbol>' for number, path in enumerate(MARKERS)
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true">{made}</svg>'
