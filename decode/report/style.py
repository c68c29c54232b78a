"""The style sheet of the report pages."""

CSS = """
:root{--paper:#fcfcfb;--ink:#1d2024;--soft:#5c636d;--line:#e0e2e5;--card:#f3f4f5;--accent:#2a6fb0;
--good:#1f7a55;--warn:#9a5b00;--bad:#b3323f;--good-bg:#e2f3ea;--warn-bg:#fbefd9;--bad-bg:#fbe4e5;
--accepted:#d8efe2;--corrected:#fbdcc0;--bonus:#d9e7f8;--rejected:#f6d3d6}
@media(prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e4e6e8;--soft:#9aa2ac;--line:#30353b;
--card:#1e2125;--accent:#79b2e8;--good:#6fcb9f;--warn:#e5ae55;--bad:#ef8d93;--good-bg:#17342a;--warn-bg:#3a2c12;
--bad-bg:#3d1f23;--accepted:#1d4534;--corrected:#5a3a17;--bonus:#20405f;--rejected:#552a30}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:2.5rem 1.5rem 5rem}
header{margin-bottom:1.75rem}
.kicker{margin:0 0 .35rem;color:var(--soft);font-size:.85rem;letter-spacing:.02em}
h1{margin:0 0 .6rem;font-size:1.9rem;line-height:1.2;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{margin:3rem 0 .5rem;padding-top:1.1rem;border-top:1px solid var(--line);font-size:1.25rem;line-height:1.3}
p{max-width:46rem;margin:.4rem 0 1rem}
.lead{margin:0;font-size:1.2rem;line-height:1.5}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.875em}
p code,dd code,dt code,td code,figcaption code{padding:.08em .3em;border-radius:4px;background:var(--card)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(230px,1fr));gap:.75rem;margin:0 0 1.5rem}
.tile{padding:.8rem 1rem .9rem;border-radius:10px;background:var(--card);border-left:4px solid var(--line)}
.tile.good{border-color:var(--good)}.tile.warn{border-color:var(--warn)}.tile.bad{border-color:var(--bad)}
.tile dt{color:var(--soft);font-size:.85rem}
.tile dd{margin:0}
.tile b{display:block;font-size:1.65rem;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.tile small{display:block;color:var(--soft);font-size:.82rem;line-height:1.4}
.note{max-width:none;padding:.75rem 1rem;border-radius:10px;border-left:4px solid var(--accent);background:var(--card)}
.note.good{border-color:var(--good);background:var(--good-bg)}
.note.warn{border-color:var(--warn);background:var(--warn-bg)}
.note.bad{border-color:var(--bad);background:var(--bad-bg)}
.scroll{overflow-x:auto;margin:1.25rem 0 .5rem}
table{border-collapse:separate;border-spacing:0;min-width:100%;font-size:15px;line-height:20px}
table.short{min-width:0}
caption{padding:0 0 6px;text-align:left;color:var(--soft)}
th,td{padding:8px 10px;text-align:left;vertical-align:middle;white-space:nowrap}
th{color:var(--soft);font-weight:600;border-bottom:2px solid var(--line);vertical-align:bottom}
th[title]{text-decoration:underline dotted;text-underline-offset:3px;cursor:help}
td{border-bottom:1px solid var(--line)}
th:first-child,td:first-child{padding-left:3px;position:sticky;left:0;
background:var(--paper)}
.num{text-align:right;font-variant-numeric:tabular-nums}
td.best{font-weight:700;color:var(--good)}
.none{color:var(--soft)}
.badge{padding:.1em .55em;border-radius:999px;background:var(--card);font-size:.85em;white-space:nowrap}
.badge.good{background:var(--good-bg);color:var(--good)}
.badge.warn{background:var(--warn-bg);color:var(--warn)}
.badge.bad{background:var(--bad-bg);color:var(--bad)}
.legend,.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15rem .9rem;margin:.4rem 0 1.5rem;
font-size:.85rem;line-height:1.45;color:var(--soft)}
.legend dt,.facts dt{font-weight:600}
.legend dd,.facts dd{margin:0;overflow-wrap:anywhere}
.facts{font-size:.92rem}.facts dd{color:var(--ink)}
.gallery{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.5rem 2rem;margin:1rem 0}
figure{margin:0;min-width:0}
.gallery figure{max-width:560px}
figure svg{display:block;width:100%;height:auto;overflow:visible}
figcaption{margin:.3rem 0 .4rem;color:var(--soft);font-size:.88rem;line-height:1.45}
.text,.code{margin:1rem 0}
pre{margin:0;padding:.8rem 1rem;border-radius:10px;background:var(--card);overflow-x:auto;line-height:1.55}
.text pre{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9}
.text pre span,.key span{padding:.14em 0;border-radius:3px;box-shadow:inset -1px 0 0 var(--paper)}
.key{margin:.5rem 0;font-size:.85rem;line-height:2}
.key span{padding:.14em .5em;margin-right:.3rem}
.w-accepted{background:var(--accepted)}.w-corrected{background:var(--corrected)}
.w-bonus{background:var(--bonus)}.w-corrected{border-bottom:2px solid var(--warn)}
.w-rejected{background:var(--rejected);text-decoration:line-through}
.w-prompt{color:var(--soft)}
.nl{color:var(--soft);font-style:normal;font-size:.8em;user-select:none}
details{margin:.75rem 0}
summary{cursor:pointer;color:var(--accent)}
details pre{margin-top:.5rem;max-height:30rem;overflow:auto}
@media(max-width:600px){main{padding:1.5rem 1rem 3rem}h1{font-size:1.5rem}.lead{font-size:1.08rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}.tile{padding:.65rem .75rem}.tile b{font-size:1.35rem}
.legend,.facts{grid-template-columns:1fr;gap:0}.legend dd,.facts dd{margin-bottom:.4rem}
th,td{padding:7px 9px}}
@media print{main{max-width:none;padding:0}h2{break-after:avoid}figure,.tile{break-inside:avoid}}
""".strip()
