// The filter of the page of all runs, and sorting by a click on a heading; without it the page shows everything.
const all = (what, where = document) => [...where.querySelectorAll(what)];
const form = document.querySelector('.filters');
function apply() {
  const {words, lossless, ...chosen} = Object.fromEntries(new FormData(form));
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of all('.all-runs tbody tr:not(.group)')) {
    const name = row.cells[0].textContent.toLowerCase();
    row.hidden = !wanted.every(word => name.includes(word)) || Boolean(lossless && row.querySelector('.badge.warn'));
  }
  for (const part of all('main [data-run]')) {
    const rows = all('tr:not(.group)', part);
    part.hidden = Object.entries(chosen).some(([key, value]) => value && part.dataset[key] !== value) ||
      (rows.length > 0 && rows.every(row => row.hidden));
  }
}
function sort(heading) {
  const at = heading.cellIndex, sign = heading.dataset.sorted === 'down' ? 1 : -1;
  const value = row => {
    const text = row.cells[at].textContent.replaceAll(',', ''), number = parseFloat(text);
    return heading.className === 'num' ? (Number.isNaN(number) ? sign * Infinity : number) : text;
  };
  all('.all-runs thead th').forEach(other => delete other.dataset.sorted);
  heading.dataset.sorted = sign < 0 ? 'down' : 'up';
  for (const body of all('.all-runs tbody')) {
    const rows = all('tr:not(.group)', body).map(row => [value(row), row]);
    body.append(...rows.sort(([a], [b]) => sign * (a < b ? -1 : a > b ? 1 : 0)).map(([, row]) => row));
  }
}
for (const heading of all('.all-runs thead th')) heading.onclick = () => sort(heading);
form.addEventListener('input', apply);
form.addEventListener('submit', event => event.preventDefault());
form.addEventListener('reset', () => setTimeout(apply));
form.hidden = false;
