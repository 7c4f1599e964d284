// Runs the steps of a client, in one process as long as its user wants.
import { createInterface } from "node:readline";

/**
 * For each line that names a step: run it, and print what it returns as a line of JSON.
 * Where it throws: the error with its stack as `raised`.
 */
export async function serve(steps) {
  for await (const line of createInterface({ input: process.stdin })) {
    let result;
    try {
      result = (await steps[line]()) ?? null;
    } catch (error) {
      result = { raised: String(error.stack) };
    }
    console.log(JSON.stringify(result));
  }
}
