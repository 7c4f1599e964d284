// Layout shifts that the browser has counted since the page was filled.
new Promise((resolve) => {
  let sum = 0;
  const observer = new PerformanceObserver((list) => { for (const e of list.getEntries()) if (e.startTime > performance.now() - 4000) sum += e.value; });
  observer.observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() => setTimeout(() => resolve(sum), 50));
})
