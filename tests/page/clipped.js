// Elements whose text does not fit though nothing says that it may be cut.
[...document.querySelectorAll("main *")]
  .filter((e) => e.children.length === 0 && e.textContent.trim() && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
  .filter((e) => !e.closest(".sr, .clip, .id, .more, .hint") && getComputedStyle(e).display !== "inline")
  .map((e) => `${e.className || e.tagName}: ${e.textContent}`)
