// Chats with OpenAI's client.
import OpenAI, { APIConnectionTimeoutError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { serve } from "./steps.mjs";

const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY

const asked = {
  model: "sim",
  messages: [
    { role: "developer", content: "You are the weather desk of an island. ".repeat(10) },
    { role: "user", content: "Will it rain in Oslo?" },
  ],
  temperature: 0,
};
const Weather = z.object({ city: z.string(), celsius: z.int() });
const tools = [
  { type: "function", function: { name: "weather", parameters: z.toJSONSchema(Weather) } },
];

async function chat() {
  const completion = await client.chat.completions.create({ ...asked, max_completion_tokens: 12 });
  return { text: completion.choices[0].message.content, usage: used(completion.usage) };
}

async function stream() {
  const pieces = [];
  let usage;
  for await (const chunk of await client.chat.completions.create({
    ...asked,
    max_completion_tokens: 12,
    stream: true,
    stream_options: { include_usage: true },
  })) {
    const piece = chunk.choices[0]?.delta.content;
    if (piece) pieces.push(piece);
    usage = chunk.usage ?? usage;
  }
  return { pieces, usage: used(usage) };
}

async function tool() {
  const tool_choice = { type: "function", function: { name: "weather" } };
  const completion = await client.chat.completions.create({ ...asked, tools, tool_choice });
  const [call] = completion.choices[0].message.tool_calls;
  return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
}

async function streamed_tool() {
  const events = client.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
  const completion = await events.finalChatCompletion();
  const [call] = completion.choices[0].message.tool_calls;
  return { name: call.function.name, arguments: JSON.parse(call.function.arguments) };
}

async function structured() {
  const response_format = zodResponseFormat(Weather, "weather");
  const completion = await client.chat.completions.parse({ ...asked, response_format });
  return completion.choices[0].message.parsed;
}

async function unknown_model() {
  try {
    await client.chat.completions.create({ ...asked, model: "none" });
  } catch (error) {
    if (error instanceof NotFoundError) return error.message;
    throw error;
  }
}

async function cancelled() {
  const chunks = await client.chat.completions.create({
    ...asked,
    max_completion_tokens: 2000,
    stream: true,
  });
  for await (const chunk of chunks) {
    if (chunk.choices[0].delta.content) {
      chunks.controller.abort();
      return true;
    }
  }
}

async function timed_out() {
  const messages = [{ role: "user", content: "Will it rain? ".repeat(1000) }];
  try {
    await client.chat.completions.create({ ...asked, messages }, { timeout: 3000, maxRetries: 0 });
  } catch (error) {
    if (error instanceof APIConnectionTimeoutError) return true;
    throw error;
  }
}

const used = (usage) => ({ input: usage.prompt_tokens, output: usage.completion_tokens });

await serve({ chat, stream, tool, streamed_tool, structured, unknown_model, cancelled, timed_out });
