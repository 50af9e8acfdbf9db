// The AI SDK (OpenAI-compatible provider): three turns with a picture and a clip, whole and streamed.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import assert from "node:assert";
import { readFileSync } from "node:fs";

const given = JSON.parse(readFileSync(0, "utf8"));
const provider = createOpenAICompatible({ name: "mingc", baseURL: given.url, apiKey: given.key, includeUsage: true });
const model = provider(given.model);

const messages = [];
const turns = [
    [
        { type: "text", text: "What is in this picture?" },
        { type: "image", image: given.image, mediaType: "image/png" },
    ],
    [
        { type: "text", text: "And what does the voice say?" },
        { type: "file", data: given.clip, mediaType: "audio/wav" },
    ],
    [{ type: "text", text: "Thank you." }],
];
for (const content of turns) {
    messages.push({ role: "user", content });
    const { response, usage } = await generateText({ model, system: "Answer briefly.", messages, maxOutputTokens: 12 });
    assert.ok(usage.outputTokens > 0);
    messages.push(...response.messages);
}
messages.push({ role: "user", content: "Once more." });
const { textStream, usage } = streamText({ model, messages, maxOutputTokens: 12 });
for await (const _ of textStream);
assert.ok((await usage).outputTokens > 0);
