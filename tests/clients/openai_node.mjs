// The official OpenAI client for JavaScript: three turns with a picture, a clip and spoken answers, whole and streamed;
// tools, constrained answers, log probabilities, completions, speech, transcripts, a voice of one's own.

import OpenAI, { toFile } from "openai";
import assert from "node:assert";
import { createReadStream, readFileSync } from "node:fs";

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

for (const format of ["mp3", "pcm"]) {
    const request = { model: given.model, voice, input: "Hello again.", response_format: format };
    let bytes = 0;
    for await (const part of (await client.audio.speech.create(request)).body) bytes += part.length;
    assert.ok(bytes > 1000, format);
}
const events = await client.audio.speech.create({ model: given.model, voice, input: "Hello.", stream_format: "sse" });
assert.match(await events.text(), /speech\.audio\.delta[^]*speech\.audio\.done/);

const parameters = { type: "object", properties: { city: { enum: ["Bern"] } }, required: ["city"], additionalProperties: false };
const ask = { ...common, max_tokens: 60, messages: [{ role: "user", content: "How is the weather?" }] };
const tools = [{ type: "function", function: { name: "get_weather", strict: true, parameters } }];
const forced = client.chat.completions.stream({ ...ask, tools, tool_choice: "required", parallel_tool_calls: false });
const [call] = (await forced.finalMessage()).tool_calls;
assert.deepEqual([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Bern" }]);
const format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: parameters } };
const parsed = await client.chat.completions.parse({ ...ask, response_format: format, logprobs: true, top_logprobs: 2 });
assert.deepEqual(parsed.choices[0].message.parsed, { city: "Bern" });
const written = parsed.choices[0].logprobs.content.flatMap((each) => each.bytes ?? []);
assert.equal(Buffer.from(written).toString(), parsed.choices[0].message.content);

const scripted = new OpenAI({ baseURL: given.tools_url, apiKey: "none" });
for (const stream of [false, true]) {
    const results = [];
    const one = (name, key, answer) => ({
        type: "function",
        function: {
            name,
            description: name,
            parameters: { type: "object", properties: { [key]: { type: "string" } } },
            parse: JSON.parse,
            function: (args) => (results.push(args[key]), answer),
        },
    });
    const runner = scripted.chat.completions.runTools({
        model: "fake",
        stream,
        messages: [{ role: "user", content: "What is the weather in Zürich, and what time is it?" }],
        tools: [one("get_weather", "city", "18 °C"), one("get_time", "zone", "noon")],
    });
    assert.equal(await runner.finalContent(), "It is 18 °C at noon.");
    assert.deepEqual(results, ["Zürich", "欧洲/Zürich"]);
}

const more = { model: given.model, prompt: "Once upon a time", max_tokens: 8, logprobs: 1 };
const whole = (await client.completions.create(more)).choices[0];
assert.equal(whole.logprobs.tokens.length, whole.logprobs.text_offset.length);
let streamed = "";
for await (const chunk of await client.completions.create({ ...more, stream: true })) streamed += chunk.choices[0]?.text ?? "";
assert.equal(streamed, whole.text);

const spokenFile = () => createReadStream(given.microphone);
const asked = { model: given.model, language: "en" };
const verbose = await client.audio.transcriptions.create({
    ...asked, file: spokenFile(), response_format: "verbose_json", timestamp_granularities: ["segment"],
});
assert.ok(verbose.segments.length > 0 && verbose.segments[0].end > verbose.segments[0].start && verbose.duration > 1);
const subtitles = await client.audio.transcriptions.create({ ...asked, file: spokenFile(), response_format: "srt" });
assert.match(subtitles, /^1\n00:00:0\d,\d{3} --> /);
let heard = "";
for await (const event of await client.audio.transcriptions.create({
    ...asked, file: spokenFile(), stream: true, chunking_strategy: { type: "server_vad", silence_duration_ms: 600 },
})) {
    if (event.type === "transcript.text.delta") heard += event.delta;
    else assert.equal(event.text, heard);
}

const recording = await toFile(readFileSync(given.microphone), "ann.wav", { type: "audio/wav" });
const form = { name: "Ann", consent: "on paper", ref_text: "One sentence. Another one. And a third.", audio_sample: recording };
const body = new FormData();
for (const [name, value] of Object.entries(form)) body.append(name, value);
const added = await client.post("/audio/voices", { body });
const cloned = await client.audio.speech.create({
    model: given.model, voice: { id: added.id }, input: "Hello.", response_format: "wav",
});
assert.equal(Buffer.from(await cloned.arrayBuffer()).subarray(0, 4).toString(), "RIFF");
assert.ok((await client.get("/audio/voices")).data.some((each) => each.id === added.id));
assert.ok((await client.delete(`/audio/voices/${added.id}`)).deleted);
