// Asks for responses with OpenAI's client.
import OpenAI, { NotFoundError } from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { serve } from "./steps.mjs";

const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY

const asked = {
  model: "sim",
  instructions: "You are the weather desk of a canal. ".repeat(10),
  input: "Will it rain in Oslo?",
  temperature: 0,
};
const Weather = z.object({ city: z.string(), celsius: z.int() });
const tools = [{ type: "function", name: "weather", parameters: z.toJSONSchema(Weather) }];

async function chat() {
  const response = await client.responses.create({ ...asked, max_output_tokens: 12 });
  return { text: response.output_text, usage: used(response.usage) };
}

async function stream() {
  const pieces = [];
  const events = client.responses.stream({ ...asked, max_output_tokens: 12 });
  events.on("response.output_text.delta", (event) => pieces.push(event.delta));
  const response = await events.finalResponse();
  return { pieces, usage: used(response.usage) };
}

async function tool() {
  const tool_choice = { type: "function", name: "weather" };
  const response = await client.responses.create({ ...asked, tools, tool_choice });
  const [call] = response.output.filter((item) => item.type === "function_call");
  return { name: call.name, arguments: JSON.parse(call.arguments) };
}

async function structured() {
  const text = { format: zodTextFormat(Weather, "weather") };
  return (await client.responses.parse({ ...asked, text })).output_parsed;
}

async function unknown_model() {
  try {
    await client.responses.create({ ...asked, model: "none" });
  } catch (error) {
    if (error instanceof NotFoundError) return error.message;
    throw error;
  }
}

async function cancelled() {
  const events = await client.responses.create({ ...asked, max_output_tokens: 2000, stream: true });
  for await (const event of events) {
    if (event.type === "response.output_text.delta") {
      events.controller.abort();
      return true;
    }
  }
}

const used = (usage) => ({ input: usage.input_tokens, output: usage.output_tokens });

await serve({ chat, stream, tool, structured, unknown_model, cancelled });
