"""The style and the script of the page: search, and links between its parts."""

STYLE = """
:root { --half: #1a7f37; --wide: #b35900; --both: #7a4fb5; --line: #d0d7de;
  --back: #fff; --text: #1f2328; --soft: #f6f8fa; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --half: #3fb950; --wide: #e3934a;
  --both: #b392f0; --line: #3d444d; --back: #0d1117; --text: #e6edf3;
  --soft: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); }
header { padding: 12px 20px; border-bottom: 1px solid var(--line); }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 16px; } h3 { font-size: 14px; }
header p { margin: 4px 0; }
main { padding: 0 20px; display: grid; grid-template-columns: 260px minmax(0, 1fr);
  gap: 0 24px; }
nav { grid-row: span 3; }
nav ul { list-style: none; padding-left: 12px; margin: 2px 0; }
nav > ul { padding: 0; } nav li { overflow-wrap: anywhere; }
nav small { white-space: nowrap; }
nav summary { cursor: pointer; } meter { width: 48px; height: 10px; }
input { font: inherit; padding: 4px 8px; width: min(420px, 100%);
  border: 1px solid var(--line); border-radius: 6px; background: var(--soft);
  color: inherit; }
a { color: inherit; text-decoration-color: var(--line); } a:hover { color: #0969da; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
td:nth-child(3) { white-space: normal; overflow-wrap: break-word; min-width: 150px; }
td:last-child { white-space: normal; }
.here td:last-child::after { content: ": " attr(title); }
th { background: var(--soft); position: sticky; top: 0; } tr { scroll-margin: 44px; }
.list { max-height: 60vh; overflow: auto; } .number { text-align: right; }
.chip { border-radius: 8px; padding: 0 8px; color: #fff; white-space: nowrap;
  font-size: 13px; }
.chip.half { background: #1a7f37; } .chip.wide { background: #b35900; }
.chip.both { background: #7a4fb5; }
nav .half > a, nav .half > details > summary > a { color: var(--half); }
nav .wide > a, nav .wide > details > summary > a { color: var(--wide); }
nav .both > a, nav .both > details > summary > a { color: var(--both); }
pre { overflow-x: auto; background: var(--soft); padding: 8px 0; border-radius: 6px;
  font-size: 13px; } pre span { display: block; padding: 0 8px;
  border-left: 4px solid transparent; }
pre .half { border-color: var(--half); } pre .wide { border-color: var(--wide); }
pre .both { border-color: var(--both); } pre i { font-style: normal; opacity: .7; }
.gap { opacity: .5; } .here { background: #fff8c5; }
@media (prefers-color-scheme: dark) { .here { background: #3a3000; } }
@media (max-width: 760px) {
  main { display: block; padding: 0 12px; } header { padding: 12px; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: block; padding: 6px 0; border-bottom: 1px solid var(--line); }
  td { display: inline-block; white-space: normal; overflow-wrap: anywhere; border: 0;
    padding: 0 10px 0 0; text-align: left; }
  td:nth-child(5):not(:empty)::after { content: " FLOPs"; }
  td:nth-child(6)::after { content: "B"; }
  td:empty { display: none; }
}
"""

SCRIPT = """
const rows = [...document.querySelectorAll("tbody tr")];
const words = rows.map(row => row.textContent.toLowerCase());
const search = document.getElementById("search");
function show(query) {
  const parts = query.toLowerCase().split(" ").filter(Boolean);
  let count = 0;
  rows.forEach((row, i) => {
    row.hidden = !parts.every(part => words[i].includes(part));
    count += !row.hidden;
  });
  document.getElementById("count").textContent =
    count + " of " + rows.length + " operations";
}
function follow() {
  const hash = decodeURIComponent(location.hash.slice(1));
  document.querySelectorAll(".here").forEach(e => e.classList.remove("here"));
  if (hash.startsWith("q=")) {
    search.value = hash.slice(2);
    show(search.value);
    document.querySelector("h2 + .list").scrollIntoView({block: "center"});
    return;
  }
  const found = hash && document.getElementById(hash);
  if (!found) return;
  found.hidden = false;
  found.classList.add("here");
  const line = found.dataset.line && document.getElementById(found.dataset.line);
  if (line) line.classList.add("here");
  found.scrollIntoView({block: "center"});
}
search.addEventListener("input", () => show(search.value));
addEventListener("hashchange", follow);
show("");
follow();
"""
