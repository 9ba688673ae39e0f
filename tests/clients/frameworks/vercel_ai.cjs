// The three providers that people point at a server of their own: each calls a tool and goes on, streams, and gives an
// object of a schema.
const assert = require("node:assert");
const { generateText, generateObject, streamText, stepCountIs, tool } = require("ai");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const baseURL = process.env.SERVER + "/v1";
const openai = createOpenAI({ baseURL });
const compatible = createOpenAICompatible({ name: "satchel", baseURL, supportsStructuredOutputs: true });
const models = {
  compatible: compatible("satchel/script"),
  chat: openai.chat("satchel/script"),
  responses: openai.responses("satchel/script"),
  messages: createAnthropic({ baseURL })("satchel/script"),
};
const tools = {
  read_file: tool({
    description: "Reads a file.",
    inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => `the heron sleeps at ${path}`,
  }),
};
const person = z.object({ name: z.enum(["Ada", "Grace"]), age: z.union([z.literal(36), z.literal(85)]) });
const asked = { prompt: "Please read the file /note.txt", tools, stopWhen: stepCountIs(3) };
const said = "It says: the heron sleeps at /note.txt";

(async () => {
  for (const [name, model] of Object.entries(models)) {
    const whole = await generateText({ model, ...asked });
    assert.strictEqual(whole.text, said, name);
    assert.strictEqual(whole.steps.length, 2, name);
    const stream = streamText({ model, ...asked, onError: ({ error }) => { throw error; } });
    let pieces = 0;
    for await (const _ of stream.textStream) pieces += 1;
    assert.strictEqual(await stream.text, said, name);
    // A slow reader gets what was written meanwhile in one piece.
    assert.ok(pieces > 1, name);
    const { object } = await generateObject({ model, schema: person, prompt: "Who is it?" });
    assert.ok(person.safeParse(object).success, name);
  }
})();
