// Long names, as of tests, end a line after `_`, `:`, `.`, `(` or `,` rather than within a word.
document.querySelectorAll("article :not(pre) > code").forEach((code) => {
  if (code.textContent.length < 25 || code.children.length) return;
  const parts = code.textContent.split(/(?<=[_:.(,])(?![_:.(,])/);
  code.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
});
// Numbers with their spread stay in one line; wide tables scroll.
document.querySelectorAll("article td").forEach((cell) => {
  if (/^[\d.,±%\s×-]+$/.test(cell.textContent)) cell.style.whiteSpace = "nowrap";
});
