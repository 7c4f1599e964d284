// Numbers as people read them. Every function takes null for "not known".

const THIN = "\u2009";
export const NONE = "–";

const scaled = (value, step, units) => {
  let unit = 0;
  while (Math.abs(value) >= step * 0.9995 && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  return [value, units[unit]];
};

const digits = (value) => {
  const size = Math.abs(value);
  if (size >= 99.95 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(size >= 9.995 ? 1 : 2);
};

/** [number, unit] of a count: 1234 is ["1.23", "k"]. */
export const countParts = (value) => {
  if (value == null) return [NONE, ""];
  if (Math.abs(value) < 1000) return [digits(Math.abs(value) >= 100 ? Math.round(value) : value), ""];
  const [number, unit] = scaled(value, 1000, ["", "k", "M", "G", "T"]);
  return [digits(number), unit];
};

export const count = (value) => joined(countParts(value));

/** [number, unit] of seconds. */
export const timeParts = (seconds) => {
  if (seconds == null) return [NONE, ""];
  if (seconds < 0.0995) return [(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0), "ms"];
  if (seconds < 0.9995) return [(seconds * 1000).toFixed(0), "ms"];
  return [seconds.toFixed(seconds < 9.995 ? 2 : 1), "s"];
};

export const time = (seconds) => joined(timeParts(seconds));

/** An age or uptime in its two largest units. */
export const span = (seconds) => {
  if (seconds == null) return NONE;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s}${THIN}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${THIN}min ${s % 60}${THIN}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}${THIN}h ${Math.floor((s % 3600) / 60)}${THIN}min`;
  return `${Math.floor(s / 86400)}${THIN}d ${Math.floor((s % 86400) / 3600)}${THIN}h`;
};

/** The time that a figure is about: "last minute", "last 2 min". A minute is one of readings, a second apart. */
export const lately = (seconds) => `last ${Math.abs(seconds - 60) < 2.5 ? "minute" : rough(seconds)}`;

/** A time in one unit. */
export const rough = (seconds) => {
  if (seconds < 90) return `${Math.round(seconds)}${THIN}s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)}${THIN}min` : `${Math.round(seconds / 3600)}${THIN}h`;
};

export const bytes = (value) => {
  if (value == null) return NONE;
  const [number, unit] = scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  return `${digits(unit === "B" ? Math.round(number) : number)}${THIN}${unit}`;
};

/** A share of 1 in percent, [number, "%"]. */
export const percentParts = (share) => {
  if (share == null || !Number.isFinite(share)) return [NONE, ""];
  const value = share * 100;
  return [value === 0 || value >= 99.95 ? value.toFixed(0) : value.toFixed(1), "%"];
};

export const percent = (share) => joined(percentParts(share));

export const joined = ([number, unit]) => (unit ? `${number}${THIN}${unit}` : number);

export const clock = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleTimeString([], { hour12: false });

export const plural = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
