// Sends messages with Anthropic's client.
import Anthropic, { APIConnectionTimeoutError, NotFoundError } from "@anthropic-ai/sdk";

import { serve } from "./steps.mjs";

const client = new Anthropic(); // ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY

const asked = {
  model: "sim",
  system: "You are the weather desk of a desert. ".repeat(10),
  messages: [{ role: "user", content: "Will it rain in Oslo?" }],
  temperature: 0,
};
const tools = [
  {
    name: "weather",
    description: "The weather.",
    input_schema: {
      type: "object",
      properties: { city: { type: "string" }, celsius: { type: "integer" } },
      required: ["city", "celsius"],
    },
  },
];

async function chat() {
  const message = await client.messages.create({ ...asked, max_tokens: 12 });
  return { text: message.content[0].text, usage: used(message.usage) };
}

async function stream() {
  const pieces = [];
  const stream = client.messages.stream({ ...asked, max_tokens: 12 });
  stream.on("text", (piece) => pieces.push(piece));
  const message = await stream.finalMessage();
  return { pieces, usage: used(message.usage) };
}

async function tool() {
  const tool_choice = { type: "tool", name: "weather" };
  return called(await client.messages.create({ ...asked, max_tokens: 200, tools, tool_choice }));
}

async function streamed_tool() {
  const tool_choice = { type: "any" };
  const stream = client.messages.stream({ ...asked, max_tokens: 200, tools, tool_choice });
  return called(await stream.finalMessage());
}

async function unknown_model() {
  try {
    await client.messages.create({ ...asked, max_tokens: 12, model: "none" });
  } catch (error) {
    if (error instanceof NotFoundError) return error.message;
    throw error;
  }
}

async function cancelled() {
  const stream = await client.messages.create({ ...asked, max_tokens: 2000, stream: true });
  for await (const event of stream) {
    if (event.type === "content_block_delta") {
      stream.controller.abort();
      return true;
    }
  }
}

async function timed_out() {
  const body = { ...asked, max_tokens: 12 };
  body.messages = [{ role: "user", content: "Will it rain? ".repeat(1000) }];
  try {
    await client.messages.create(body, { timeout: 3000, maxRetries: 0 });
  } catch (error) {
    if (error instanceof APIConnectionTimeoutError) return true;
    throw error;
  }
}

function called(message) {
  const [call] = message.content.filter((block) => block.type === "tool_use");
  return { name: call.name, arguments: call.input };
}

const used = (usage) => ({
  input: usage.input_tokens + (usage.cache_read_input_tokens ?? 0),
  output: usage.output_tokens,
});

await serve({ chat, stream, tool, streamed_tool, unknown_model, cancelled, timed_out });
