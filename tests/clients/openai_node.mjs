// The official OpenAI client for JavaScript: three turns with a picture, a clip and spoken answers, whole and streamed.

import OpenAI from "openai";
import assert from "node:assert";
import { readFileSync } from "node:fs";

const given = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: given.url, apiKey: given.key });
const common = { model: given.model, max_tokens: 12 };
const spoken = { modalities: ["text", "audio"], audio: { voice: given.voice, format: "wav" } };

const messages = [{ role: "developer", content: "Answer briefly." }];
const turns = [
    [
        { type: "text", text: "What is in this picture?" },
        { type: "image_url", image_url: { url: `data:image/png;base64,${given.image}`, detail: "low" } },
    ],
    [
        { type: "text", text: "And what does the voice say?" },
        { type: "input_audio", input_audio: { data: given.clip, format: "wav" } },
    ],
    [{ type: "text", text: "Thank you." }],
];
for (const content of turns) {
    messages.push({ role: "user", content });
    const answer = await client.chat.completions.create({ ...common, ...spoken, messages });
    const message = answer.choices[0].message;
    assert.equal(Buffer.from(message.audio.data, "base64").subarray(0, 4).toString(), "RIFF");
    messages.push(message); // as received, with the sound
}
messages.push({ role: "user", content: "Once more." });
const stream = client.chat.completions.stream({ ...common, messages, stream_options: { include_usage: true } });
const final = await stream.finalChatCompletion();
assert.ok(final.usage.completion_tokens > 0);
messages.push(final.choices[0].message, { role: "user", content: "And again." });
assert.ok((await client.chat.completions.create({ ...common, messages })).usage.completion_tokens > 0);

const voice = given.voice;
const speech = await client.audio.speech.create({ model: given.model, voice, input: "Hello.", response_format: "wav" });
assert.equal(Buffer.from(await speech.arrayBuffer()).subarray(0, 4).toString(), "RIFF");
