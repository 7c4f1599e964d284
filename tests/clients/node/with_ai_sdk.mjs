// Asks by Vercel's AI SDK.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, streamText, tool as toolOf } from "ai";
import { z } from "zod";

import { serve } from "./steps.mjs";

const provider = createOpenAICompatible({
  name: "kvrouter",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});

const asked = {
  model: provider("sim"),
  system: "You are the weather desk of a stadium. ".repeat(10),
  prompt: "Will it rain in Oslo?",
  temperature: 0,
};
const Weather = z.object({ city: z.string(), celsius: z.int() });
const tools = { weather: toolOf({ description: "The weather.", inputSchema: Weather }) };

async function chat() {
  const { text, usage } = await generateText({ ...asked, maxOutputTokens: 12 });
  return { text, usage: used(usage) };
}

async function stream() {
  const result = streamText({ ...asked, maxOutputTokens: 12 });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  return { pieces, usage: used(await result.usage) };
}

async function tool() {
  const toolChoice = { type: "tool", toolName: "weather" };
  const { toolCalls } = await generateText({ ...asked, tools, toolChoice });
  return { name: toolCalls[0].toolName, arguments: toolCalls[0].input };
}

async function streamed_tool() {
  const result = streamText({ ...asked, tools, toolChoice: "required" });
  const [call] = await result.toolCalls;
  return { name: call.toolName, arguments: call.input };
}

async function structured() {
  const { output } = await generateText({ ...asked, output: Output.object({ schema: Weather }) });
  return output;
}

async function unknown_model() {
  try {
    await generateText({ ...asked, model: provider("none") });
  } catch (error) {
    if (APICallError.isInstance(error) && error.statusCode === 404) return error.message;
    throw error;
  }
}

async function cancelled() {
  const controller = new AbortController();
  const { signal: abortSignal } = controller;
  const result = streamText({ ...asked, maxOutputTokens: 2000, abortSignal });
  for await (const piece of result.textStream) {
    controller.abort();
    return piece !== "";
  }
}

const used = (usage) => ({ input: usage.inputTokens, output: usage.outputTokens });

await serve({ chat, stream, tool, streamed_tool, structured, unknown_model, cancelled });
