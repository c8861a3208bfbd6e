// Long names in tables, as of tests, may end a line after `_`, `:`, `.`, `(` or `,`, and only there.
document.querySelectorAll("article td code").forEach((code) => {
  if (code.textContent.length < 25 || code.children.length) return;
  const parts = code.textContent.split(/(?<=[_:.(,])(?![_:.(,])/);
  code.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
});
