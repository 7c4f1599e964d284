// Texts whose contrast with what is behind them is below 4.5 (WCAG AA); 3 for large ones.
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.fillStyle = "#fff";
    canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (channels) => {
    const [r, g, b] = channels.map((c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => { const found = []; for (; e; e = e.parentElement) found.unshift(getComputedStyle(e).backgroundColor); return found; };
  const wrong = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const box = e.getBoundingClientRect();
    if (!own || !box.width || e.closest(".sr, [hidden], noscript, .free, .skip")) continue;
    const style = getComputedStyle(e);
    const inSvg = e instanceof SVGElement;
    const ground = behind(inSvg ? e.closest(".panel") : e);
    if (inSvg && e.closest(".node")) { const b = getComputedStyle(e.closest(".node").querySelector(".node-box")).fill; if (b !== "none") ground.push(b); }
    const [a, b] = [light(rgb(ground)), light(rgb([...ground, inSvg ? style.fill : style.color]))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) wrong.push(`${e.className?.baseVal ?? e.className}: ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return wrong;
})()
