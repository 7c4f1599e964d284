// Where every part that can be seen stands: equal before and after, nothing has moved.
[...document.querySelectorAll("main, section, h2, .tile, .plot, .legend dd, tbody tr, .tier")]
  .filter((e) => e.checkVisibility())
  .map((e) => { const b = e.getBoundingClientRect(); return [e.id || e.tagName, b.top, b.left, b.width, b.height].join(" "); })
