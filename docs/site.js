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
// Code and tables that leave the screen say that they scroll, until they were.
addEventListener("load", () => {
  document
    .querySelectorAll("article pre > code, article .md-typeset__scrollwrap")
    .forEach((box) => {
      const says = document.createElement("div");
      says.className = "scrolls";
      says.textContent = "scroll →";
      (box.closest(".highlight") ?? box).after(says);
      const look = () => {
        says.hidden = box.scrollWidth - box.clientWidth - box.scrollLeft < 8;
      };
      box.addEventListener("scroll", look);
      new ResizeObserver(look).observe(box);
    });
});
