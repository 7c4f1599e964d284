// Sets the colours before anything is drawn. Without a choice they are the system's.
"use strict";
try {
  const chosen = localStorage.getItem("kvrouter-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage here: the system's colours
}
