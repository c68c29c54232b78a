"""Style sheet and script of the page of all runs; the page is complete without the script, only unfiltered."""

STYLE = """
:root{--relaxed:#c9761d;--peer:#8a9099}
@media(prefers-color-scheme:dark){:root{--relaxed:#dc9243;--peer:#7d858f}}
[hidden]{display:none!important}
main{max-width:1360px}
.filters{position:sticky;top:0;z-index:3;display:flex;flex-wrap:wrap;gap:.5rem 1rem;align-items:end;
margin:0 -1.5rem 1.25rem;padding:.6rem 1.5rem .7rem;background:var(--paper);border-bottom:1px solid var(--line)}
.filters label{display:grid;gap:.15rem;color:var(--soft);font-size:.8rem}
.filters label.tick{display:flex;align-items:center;gap:.4rem;padding:.4rem 0;color:var(--ink);font-size:.92rem}
.filters select,.filters input[type=search]{font:inherit;font-size:.92rem;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:7px;padding:.3rem .55rem;height:2.1rem;max-width:15rem;min-width:0}
.filters button,th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer}
.filters button{color:var(--accent);padding:.4rem 0;font-size:.92rem}
.filters output{margin-left:auto;padding:.4rem 0;color:var(--soft);font-size:.88rem}
:is(button,select,input,summary,a,.scroll):focus-visible{outline:2px solid var(--accent);outline-offset:2px}
a{color:var(--accent)}
.answers{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));gap:.75rem;margin:0 0 1rem}
.answers article{padding:.75rem 1rem .85rem;border-radius:10px;background:var(--card);border-left:4px solid var(--line)}
.answers .good{border-color:var(--good)}.answers .warn{border-color:var(--warn)}.answers .bad{border-color:var(--bad)}
.answers h3{margin:0;font-size:.85rem;font-weight:400;color:var(--soft)}
.answers p{margin:.15rem 0 0;font-size:.9rem;line-height:1.45}
.answers .pick{display:flex;justify-content:space-between;gap:.75rem;align-items:baseline;font-size:1.05rem;
font-weight:650}
.answers .pick span{overflow-wrap:anywhere}
.answers .pick b{font-size:1.45rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.answers small,.group small,td small{color:var(--soft);font-size:.82rem;font-weight:400}
.methods td:first-child{min-width:9rem;max-width:17rem;white-space:normal;line-height:1.3;overflow-wrap:anywhere}
.methods tbody th.group{padding:1.5rem 3px .45rem;color:var(--ink);background:var(--paper);text-decoration:none;
border-bottom:1px solid var(--line);position:static;font-weight:400}
.group div{position:sticky;left:3px;width:max-content;max-width:min(1290px,calc(100vw - 3rem));white-space:normal}
.group b{font-size:1.02rem}
.methods tr[data-name]:hover td{background:var(--card)}
.methods th button{text-decoration:inherit;font-weight:inherit}
th[aria-sort] button::after{content:" ↓"}th[aria-sort=ascending] button::after{content:" ↑"}
.best td:first-child{font-weight:650}
.bar{position:relative;display:block;width:clamp(110px,16vw,220px);height:16px}
.bar>*{position:absolute;left:0;top:0;height:100%}
.bar i{top:3px;height:10px;width:calc(var(--v)/var(--max)*100%);background:var(--accent);border-radius:0 3px 3px 0}
.bar.relaxed i{background:repeating-linear-gradient(135deg,var(--relaxed) 0 4px,transparent 4px 6px);
border:1px solid var(--relaxed)}
.bar.peer i{background:var(--peer)}
.bar u{left:calc(var(--lo)/var(--max)*100%);width:calc((var(--hi) - var(--lo))/var(--max)*100%);
border:solid var(--ink);border-width:0 1.5px;opacity:.85;
background:linear-gradient(var(--ink),var(--ink)) center/100% 1.5px no-repeat}
.bar s{left:calc(var(--p)/var(--max)*100% - 4px);top:4px;width:8px;height:8px;transform:rotate(45deg);
background:var(--paper);border:2px solid var(--good)}
.bar q{left:calc(100%/var(--max));top:-8px;height:34px;border-left:1.5px dashed var(--soft);quotes:none}
.axis{position:relative;display:block;width:clamp(110px,16vw,220px);height:1.2em;font-weight:400;font-size:.82rem}
.axis span{position:absolute;transform:translateX(-50%)}
.barkey{display:flex;flex-wrap:wrap;gap:.3rem 1.3rem;margin:.75rem 0 0;padding:0;max-width:none;list-style:none;
font-size:.86rem;color:var(--soft)}
.barkey li{display:flex;align-items:center;gap:.45rem}
.barkey .bar{width:30px;--max:1;--v:.8;--lo:.55;--hi:1;--p:.5}
.barkey .bar q{left:50%;top:0;height:16px}
.methods{font-size:14px}.methods :is(th,td){padding-left:7px;padding-right:7px}
.answers details{grid-column:1/-1}.answers details[open]{display:grid;gap:.75rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 2rem}
.plots .wide{grid-column:1/-1}
.block{margin:1.25rem 0 2rem}
.block>h3{margin:0 0 .3rem;font-size:1.02rem}
.block .text pre{font-size:.82em;padding:.6rem .9rem}
.samples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:0 1.5rem}
.share{display:flex;height:8px;border-radius:4px;overflow:hidden;margin:.2rem 0 .45rem;background:var(--card)}
.share i{display:block}
@media(max-width:700px){.filters{position:static;margin:0 0 1rem;padding:.5rem 0 .75rem;display:grid;
grid-template-columns:repeat(2,minmax(0,1fr))}.filters select,.filters input[type=search]{width:100%;max-width:none}
.filters output{margin:0}.methods td:first-child{min-width:6.5rem;max-width:8.5rem;font-size:.9em}
.group div{max-width:calc(100vw - 2rem)}}
@media print{.filters{display:none}}
""".strip()

SCRIPT = """
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const form = document.querySelector('.filters');
  const keys = ['suite', 'temperature', 'run'];
  const rows = all('tr[data-name]'), blocks = all('[data-suite]');
  const fields = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));
  function apply() {
    const wanted = fields(), words = (wanted.words || '').toLowerCase().split(/\\s+/).filter(Boolean);
    for (const row of rows)
      row.hidden = (wanted.lossless && !row.dataset.lossless) || !words.every(word => row.dataset.name.includes(word));
    let count = 0;
    for (const block of blocks) {
      const mine = all('tr[data-name]', block), left = mine.filter(row => !row.hidden).length;
      block.hidden = keys.some(key => wanted[key] && block.dataset[key] !== wanted[key]) ||
        (mine.length > 0 && !left);
      count += block.hidden ? 0 : left;
    }
    for (const part of all('.part')) part.hidden = !all('[data-suite]', part).some(block => !block.hidden);
    for (const more of all('.answers details')) more.open ||= keys.some(key => wanted[key]);
    form.querySelector('output').value = count + ' of ' + rows.length + ' results';
    history.replaceState(null, '', '#' + new URLSearchParams(wanted));
  }
  const value = (row, at) => {
    const cell = row.cells[at], number = parseFloat(cell.dataset.v);
    return isNaN(number) ? (cell.dataset.v === undefined ? cell.textContent.toLowerCase() : null) : number;
  };
  function sort(heading) {
    const at = heading.cellIndex, was = heading.getAttribute('aria-sort');
    const up = was ? was === 'descending' : heading.dataset.first === 'ascending';
    all('.methods th[aria-sort]').forEach(other => other.removeAttribute('aria-sort'));
    heading.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    for (const body of all('.methods tbody')) {
      const order = all('tr[data-name]', body).map(row => [value(row, at), row]).sort(([a], [b]) =>
        (a === null) - (b === null) || (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1));
      body.append(...order.map(([, row]) => row));
    }
  }
  for (const heading of all('.methods thead th')) {
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...heading.childNodes);
    button.title = heading.title;
    button.onclick = () => sort(heading);
    heading.append(button);
  }
  for (const [key, chosen] of new URLSearchParams(location.hash.slice(1))) {
    const field = form.elements[key];
    if (field && field.type === 'checkbox') field.checked = true;
    else if (field && (field.tagName !== 'SELECT' || [...field.options].some(option => option.value === chosen)))
      field.value = chosen;
  }
  form.hidden = false;
  form.addEventListener('input', apply);
  form.addEventListener('submit', event => event.preventDefault());
  form.addEventListener('reset', () => setTimeout(apply));
  apply();
})();
""".strip()
